"""Rules for cubins: facts as the assembler reports them, each rule broken once, and no bytes make the reader raise."""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from gpu_sources import cuda, needs_nvrtc, needs_triton

from torch_autokern.build import compile_cuda as builder
from torch_autokern.build.cuda_toolkit import find_triton
from torch_autokern.errors import StaticRuleError
from torch_autokern.runtime.cubin import EntryInfo, MalformedCubinError, Parameter, read_cubin
from torch_autokern.runtime.cubin_rules import check_cubin, runs_on, shared_limit_bytes
from torch_autokern.runtime.plan import FloatArg, IntArg, KernelStep, LaunchPlan, OutputArg, TensorMapArg

PTX = """.version 8.7
.target {arch}
.address_size 64
.visible .entry k(.param .u64 a, .param .u32 b, .param .align 64 .b8 c[128]) .reqntid 64, 2 {{ .shared .b8 room[512]; ret; }}
"""
PLAN = cuda().plan


@pytest.fixture(scope="module")
def good() -> bytes:
    needs_nvrtc()
    return builder.compile_cuda(cuda()).binary


@pytest.fixture(scope="module")
def assemble(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """PTX through the assembler of CUDA 12.8 that Triton carries: the older layout."""
    needs_triton()
    tool = find_triton().packages["triton"] / "backends" / "nvidia" / "bin" / "ptxas"
    folder = tmp_path_factory.mktemp("ptx")

    def run(arch: str) -> bytes:
        (folder / "k.ptx").write_text(PTX.format(arch=arch))
        subprocess.run([tool, f"-arch={arch}", "k.ptx", "-o", "k.cubin"], cwd=folder, check=True, capture_output=True)
        return (folder / "k.cubin").read_bytes()

    return run


def changed(plan: LaunchPlan = PLAN, **fields: object) -> LaunchPlan:
    step = plan.steps[0]
    return LaunchPlan(1, (msgspec.structs.replace(step, **fields),))


def refusal_of(source: str, **step: object) -> str:
    needs_nvrtc()
    with pytest.raises(StaticRuleError) as caught:
        builder.compile_cuda(cuda(source, **step))  # type: ignore[arg-type]
    return str(caught.value)


def test_facts_of_a_cuda_13_cubin(good: bytes) -> None:
    info = read_cubin(good)
    entry = info.entries["scale"]
    assert (info.arch, info.abi_version, info.undefined, info.global_bytes, info.debug_sections) == ("sm_90a", 8, (), 0, ())
    # 256 floats; the driver's own KiB is not counted.
    assert entry.static_shared_bytes == 1024
    assert entry.parameters == (Parameter(0, 8), Parameter(8, 8), Parameter(16, 4), Parameter(20, 4))
    assert (entry.max_threads, entry.required_block, entry.cluster, entry.stack_bytes) == (256, None, None, 0)
    assert 4 <= entry.registers <= 64
    assert check_cubin(good, PLAN, "sm_90a") == ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_facts_of_a_cuda_12_8_cubin(arch: str, assemble: Callable[[str], bytes]) -> None:
    info = read_cubin(assemble(arch))
    assert (info.arch, info.abi_version) == (arch, 7)
    # The third parameter is aligned to 64 in the constant bank, where the block starts at 0x160 or 0x210.
    parameters = (Parameter(0, 8), Parameter(8, 4), Parameter(32 if arch == "sm_80" else 48, 128))
    assert info.entries["k"] == EntryInfo("k", info.entries["k"].registers, 512, 0, parameters, 128, (64, 2, 1), None)
    tile = TensorMapArg(OutputArg(0), 7, (8,), (), (8,), (1,))
    plan = LaunchPlan(1, (KernelStep("k", (1, 1, 1), (64, 2, 1), (OutputArg(0), IntArg(1, 32), tile)),))
    assert check_cubin(assemble(arch), plan, "sm_90a" if "90" in arch else arch) == ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_100a"])
def test_the_suffix_is_read_for_every_target(arch: str) -> None:
    needs_nvrtc()
    assert read_cubin(builder.compile_cuda(cuda(), arch).binary).arch == arch


def test_stack_and_required_cluster_are_read() -> None:
    needs_nvrtc()
    source = """extern "C" __global__ void __cluster_dims__(2, 1, 1) scale(float* y, int n) {
      float z[200]; for (int i = 0; i < 200; ++i) z[i] = y[i] * n; y[threadIdx.x] = z[n] + z[n + 1]; }"""
    candidate = cuda(source, args=(OutputArg(0), IntArg(3, 32)), cluster=(2, 1, 1))
    artifact = builder.compile_cuda(candidate)
    entry = read_cubin(artifact.binary).entries["scale"]
    assert entry.cluster == (2, 1, 1) and entry.stack_bytes >= 800
    assert artifact.resources["scale"].stack_bytes == entry.stack_bytes
    assert "requires (2, 1, 1)" in check_cubin(artifact.binary, changed(candidate.plan, cluster=(1, 1, 1)), "sm_90a")[0]


@pytest.mark.parametrize(
    ("built_for", "device", "runs"),
    [
        ("sm_80", "sm_80", True), ("sm_80", "sm_86", True), ("sm_86", "sm_80", False), ("sm_80", "sm_90a", False),
        ("sm_90", "sm_90a", True), ("sm_90a", "sm_90a", True), ("sm_100", "sm_103a", True), ("sm_100a", "sm_103a", False),
        ("sm_100f", "sm_103a", True), ("sm_103f", "sm_100a", False), ("sm_100f", "sm_120a", False),
        ("sm_120f", "sm_121a", True),
    ],
)  # fmt: skip
def test_which_code_runs_where(built_for: str, device: str, runs: bool) -> None:
    assert runs_on(built_for, device) is runs


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"entry": "other"}, "has no kernel other (it has scale)"),
        ({"args": PLAN.steps[0].args[:-1]}, "passes 3 arguments of [8, 8, 4] bytes, the kernel takes 4 of [8, 8, 4, 4]"),
        ({"args": (*PLAN.steps[0].args[:-1], FloatArg(2.0, 16))}, "arguments of [8, 8, 4, 2] bytes"),
        ({"args": (*PLAN.steps[0].args[:2], IntArg(1000, 64), FloatArg(2.0, 32))}, "arguments of [8, 8, 8, 4] bytes"),
        ({"block": (512, 1, 1)}, "512 threads a block, the kernel is bounded to 256"),
        ({"shared_bytes": 232448}, "1024 static and 232448 dynamic bytes of shared memory; at most 232448"),
    ],
)  # fmt: skip
def test_plan_that_contradicts_the_cubin_is_named(fields: dict[str, object], rule: str, good: bytes) -> None:
    assert rule in " ".join(check_cubin(good, changed(**fields), "sm_90a"))


def test_all_shared_memory_of_a_block_may_be_asked_for(good: bytes) -> None:
    most = shared_limit_bytes("sm_90a") - 1024
    assert check_cubin(good, changed(shared_bytes=most), "sm_90a") == ()


def test_required_block_is_held(assemble: Callable[[str], bytes]) -> None:
    plan = changed(PLAN, entry="k", block=(128, 1, 1))
    assert any("requires (64, 2, 1)" in rule for rule in check_cubin(assemble("sm_90a"), plan, "sm_90a"))


def test_too_many_registers_for_the_block_are_named() -> None:
    needs_nvrtc()
    sums = (
        "".join(f"float a{i} = x[{i}];" for i in range(90)) + "__syncthreads();" + "".join(f"y[{i}] = a{i};" for i in range(90))
    )
    source = f'extern "C" __global__ void scale(const volatile float* x, volatile float* y, int n, float by) {{ {sums} }}'
    assert "threads of" in refusal_of(source, block=(1024, 1, 1)) and "do not fit 65536" in refusal_of(
        source, block=(1024, 1, 1)
    )


def test_code_for_another_architecture_is_refused(good: bytes) -> None:
    assert check_cubin(good, PLAN, "sm_100a") == ("built for sm_90a, which does not run on sm_100a",)
    assert check_cubin(good, PLAN, "riscv")[0].startswith("malformed")


def test_clusters_need_hopper() -> None:
    needs_nvrtc()
    binary = builder.compile_cuda(cuda(), "sm_80").binary
    assert any("clusters need" in rule for rule in check_cubin(binary, changed(cluster=(2, 1, 1)), "sm_80"))


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ('printf("%d", n);', "needs vprintf from the driver's device runtime"),
        ("y[0] = *(float*)malloc(n);", "needs malloc from the driver's device runtime"),
        ("static __device__ int calls; y[0] = ++calls;", "bytes of global variables, which outlive a launch"),
        ("static const float table[5] = {1, 2, 3, 4, 5}; y[0] = table[n];", "use __constant__"),
    ],
)
def test_kernel_that_reaches_outside_of_its_launch_is_refused(body: str, rule: str) -> None:
    source = f'extern "C" __global__ void scale(const float* x, float* y, int n, float by) {{ {body} }}'
    assert rule in refusal_of(source)


def test_constant_tables_are_allowed() -> None:
    needs_nvrtc()
    source = """__constant__ float table[5] = {1, 2, 3, 4, 5};
    extern "C" __global__ void scale(const float* x, float* y, int n, float by) { y[0] = table[n]; }"""
    assert builder.compile_cuda(cuda(source)).resources["scale"].spilled_bytes == 0


def test_library_of_the_host_is_refused() -> None:
    assert check_cubin(Path("/bin/sh").resolve().read_bytes(), PLAN, "sm_90a")[0].startswith("malformed: ELF type")


@pytest.mark.parametrize("size", [0, 1, 16, 63, 64, 65, 500])
def test_short_files_are_malformed(size: int, good: bytes) -> None:
    assert check_cubin(good[:size], PLAN, "sm_90a")[0].startswith("malformed")


@pytest.mark.parametrize(("at", "value"), [(7, 0x42), (8, 6), (8, 9), (16, 3), (18, 62), (4, 1)])
def test_unknown_layout_type_and_machine_are_refused(at: int, value: int, good: bytes) -> None:
    other = bytearray(good)
    other[at] = value
    with pytest.raises(MalformedCubinError):
        read_cubin(bytes(other))


def test_header_and_note_must_name_one_capability(good: bytes) -> None:
    other = bytearray(good)
    other[49] = 100  # capability in the flags
    assert "the header says capability 100" in check_cubin(bytes(other), PLAN, "sm_90a")[0]
    assert "names no architecture" in check_cubin(good.replace(b"-arch sm_90a", b"-arcx sm_90a"), PLAN, "sm_90a")[0]


@pytest.mark.parametrize("layout", [7, 8])
def test_mutated_cubins_never_raise(layout: int, good: bytes, assemble: Callable[[str], bytes]) -> None:
    original = good if layout == 8 else assemble("sm_90a")
    plan = PLAN if layout == 8 else changed(PLAN, entry="k")
    (start,) = struct.unpack_from("<Q", original, 40)
    source = random.Random(layout)
    for round_number in range(600):
        mutated = bytearray(original)
        kind = round_number % 4
        if kind == 0:
            del mutated[source.randrange(len(mutated)) :]
        else:
            # Headers, section table, anywhere: in the first two a change means something.
            low, high = ((0, 64), (start, len(mutated)), (0, len(mutated)))[kind - 1]
            for _ in range(source.randint(1, 8)):
                mutated[source.randrange(low, high)] = source.choice((0, 1, 0x7F, 0xFF, source.randrange(256)))
        problems = check_cubin(bytes(mutated), plan, "sm_90a")
        assert isinstance(problems, tuple) and all(isinstance(problem, str) for problem in problems)
