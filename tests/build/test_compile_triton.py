"""Triton to cubin: header, plan and metadata are kept in step, and the source, which is Python, runs only in the box."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import msgspec
import pytest
from gpu_sources import SOFT_ARGS, TRITON_SOURCE, needs_triton, triton

from torch_autokern.build import cuda_toolkit
from torch_autokern.build.box import Limits
from torch_autokern.build.compile_triton import compile_triton
from torch_autokern.build.triton_header import NULL, read_header
from torch_autokern.errors import BuildError, StaticRuleError, ToolchainError
from torch_autokern.ops import SPECS
from torch_autokern.runtime.cubin import read_cubin
from torch_autokern.runtime.plan import InputArg, IntArg, KernelStep, LaunchPlan, OutputArg, WorkspaceArg
from torch_autokern.store.key import KernelKey, TensorKey

DESCRIBED = """# autokern: {"entry": "gram", "signature": {"x": "*fp16", "y": "*fp32"}, "constexprs": {"B": 64}, "num_warps": 8}
import triton
import triton.language as tl


@triton.jit
def gram(x, y, B: tl.constexpr):
    tiles = tl.make_tensor_descriptor(x, shape=[256, 256], strides=[256, 1], block_shape=[B, B])
    acc = tl.zeros([B, B], tl.float32)
    for i in range(4):
        tile = tiles.load([0, i * B])
        acc = tl.dot(tile, tile, acc)
    at = tl.arange(0, B)
    tl.store(y + at[:, None] * B + at[None, :], acc)
"""


@pytest.fixture(autouse=True)
def _triton() -> None:
    needs_triton()


def refusal(source: str, *steps: KernelStep, complete: bool = True) -> str:
    with pytest.raises(BuildError) as caught:
        compile_triton(triton(source, *steps), complete=complete)
    return str(caught.value)


def test_plan_is_completed_from_what_triton_decides() -> None:
    artifact = compile_triton(triton(), complete=True)
    (step,) = artifact.candidate.plan.steps
    assert isinstance(step, KernelStep)
    assert (step.block, step.shared_bytes, step.cluster, step.args) == ((128, 1, 1), 16, (1, 1, 1), (*SOFT_ARGS, NULL, NULL))
    assert artifact.identity == artifact.candidate.candidate_id != triton().candidate_id
    resources = artifact.resources["soft"]
    assert (resources.threads, resources.dynamic_shared_bytes, resources.stack_bytes) == (128, 16, 0)
    assert (artifact.kind, artifact.arch, read_cubin(artifact.binary).arch) == ("cuda", "sm_90a", "sm_90a")
    assert "seccomp" in artifact.box_level and artifact.tools["compiler"].startswith("triton ")


def test_completed_candidate_builds_again_to_the_same_bytes_without_a_path() -> None:
    first = compile_triton(triton(), complete=True)
    second = compile_triton(first.candidate)
    assert (second.candidate, second.binary) == (first.candidate, first.binary)
    for word in (b"/tmp", b"kernel.py", sys.prefix.encode(), str(Path.home()).encode(), socket.gethostname().encode()):
        assert word not in first.binary


def test_plan_that_says_otherwise_is_refused_with_the_values_needed() -> None:
    words = refusal(TRITON_SOURCE, complete=False)
    assert "block is (1, 1, 1), Triton needs (128, 1, 1)" in words
    assert "shared_bytes is 0, Triton needs 16" in words
    assert '3 arguments; needed are the 3 of the signature (x, y, n) and two scratch pointers, {"kind":"int","value":0' in words


def test_scratch_memory_becomes_a_workspace_of_the_whole_grid() -> None:
    step = KernelStep("gram", (5, 2, 1), (1, 1, 1), (InputArg(0), OutputArg(0)))
    artifact = compile_triton(triton(DESCRIBED, step), complete=True)
    (workspace,) = artifact.candidate.plan.workspaces
    assert workspace.size_bytes % 10 == 0 and workspace.size_bytes >= 10 * 128
    done = artifact.candidate.plan.steps[0]
    assert isinstance(done, KernelStep) and done.args[2:] == (WorkspaceArg(workspace.name), NULL)
    small = LaunchPlan(1, (done,), (msgspec.structs.replace(workspace, size_bytes=128),))
    with pytest.raises(StaticRuleError, match=f"must be a workspace of {workspace.size_bytes} bytes"):
        compile_triton(msgspec.structs.replace(artifact.candidate, plan=small))


def test_two_kernels_become_one_cubin() -> None:
    source = TRITON_SOURCE + DESCRIBED
    steps = (
        KernelStep("soft", (7, 1, 1), (1, 1, 1), SOFT_ARGS),
        KernelStep("gram", (1, 1, 1), (1, 1, 1), (InputArg(0), OutputArg(0))),
    )
    artifact = compile_triton(triton(source, *steps), complete=True)
    assert sorted(read_cubin(artifact.binary).entries) == ["gram", "soft"]
    assert artifact.resources["gram"].threads == 256
    assert compile_triton(artifact.candidate).binary == artifact.binary


@pytest.mark.parametrize(("arch", "made_for"), [("sm_80", "sm_80"), ("sm_86", "sm_86"), ("sm_90", "sm_90a")])
def test_other_architectures_by_name(arch: str, made_for: str) -> None:
    assert read_cubin(compile_triton(triton(), arch, complete=True).binary).arch == made_for


def test_architecture_that_is_none_is_one_clear_line() -> None:
    with pytest.raises(ToolchainError, match="no Triton build"):
        compile_triton(triton(), "hopper")


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        ("", "0 kernels declared"),
        ('{"entry": "soft"}', "missing required field `signature`"),
        ('{"entry": "soft", "signature": {"x": "*fp32", "y": "*fp32", "n": "i32"}}', "must be the same names"),
        ('{"entry": "soft", "signature": {"y": "*fp32", "x": "*fp32", "n": "i32"}, "constexprs": {"B": 1}}', "in order"),
        ('{"entry": "soft", "signature": {"x": "float*"}}', "expected such as *fp32"),
        ('{"entry": "soft", "signature": {"x": "*fp32"}, "num_warps": 3}', "3 warps"),
        ('{"entry": "soft", "signature": {"x": "*fp32"}, "divisible_by_16": ["q"]}', "which the signature lacks"),
        ('{"entry": "soft", "signature": {"x": "*fp32"}, "extern_libs": {"a": "/tmp/a.bc"}}', "unknown field"),
        ('{"entry": "so.ft", "signature": {"x": "*fp32"}}', "plain names"),
        ('{"entry": "other", "signature": {"x": "*fp32"}}', "the header declares ['other'], the plan launches ['soft']"),
    ],
)
def test_header_that_is_not_valid_is_named(header: str, rule: str) -> None:
    body = TRITON_SOURCE.split("\n", 1)[1]
    assert rule in refusal(f"# autokern: {header}\n{body}" if header else body)


def test_header_is_part_of_the_identity() -> None:
    other = TRITON_SOURCE.replace('{"B": 1024}}', '{"B": 1024}, "num_warps": 8}')
    assert triton(other).candidate_id != triton().candidate_id
    assert read_header(other)[0].num_warps == 8


def test_entry_that_is_no_kernel_is_refused() -> None:
    assert "is not a function under @triton.jit" in refusal(TRITON_SOURCE.replace("@triton.jit\n", ""))


def test_compile_error_carries_tritons_words() -> None:
    words = refusal(TRITON_SOURCE.replace("tl.max(v, 0)", "tl.maximal(v, 0)"))
    assert "maximal" in words and "does not compile" in words


def test_divisibility_must_be_kept_by_the_plan_and_by_the_key() -> None:
    claims = TRITON_SOURCE.replace('{"B": 1024}}', '{"B": 1024}, "divisible_by_16": ["x", "n"]}')
    assert 'n is declared divisible_by_16, and {"kind":"int","value":1000' in refusal(claims)
    claims = claims.replace('["x", "n"]', '["x"]')
    compile_triton(triton(claims), complete=True, key=_key(16))
    with pytest.raises(StaticRuleError, match="x is declared divisible_by_16"):
        compile_triton(triton(claims), complete=True, key=_key(8))
    moved = KernelStep("soft", (7, 1, 1), (1, 1, 1), (InputArg(0, 4), OutputArg(0), IntArg(1000, 32)))
    assert "x is declared divisible_by_16" in refusal(claims, moved)


def _key(alignment: int) -> KernelKey:
    tensor = TensorKey("float32", (7, 1000), (1000, 1), alignment)
    assert "_softmax" in SPECS
    return KernelKey("_softmax", "cuda", (tensor,), {"dim": 1, "half_to_float": False}, (tensor,))


@pytest.mark.parametrize(
    "line",
    [
        "raise SystemExit(open('/etc/passwd').read())",
        "import os; raise SystemExit('LE' + 'AK' + str(os.listdir(os.path.dirname(triton.__file__) + '/../..')))",
        "import os; raise SystemExit('LE' + 'AK' + str(os.listdir('/')))",
        f"raise SystemExit('LE' + 'AK' + open({str(Path(__file__))!r}).read())",
        "import socket; socket.create_connection(('127.0.0.1', 22)); raise SystemExit('LE' + 'AK')",
        "open('/tmp/autokern-escaped', 'w').write('x'); raise SystemExit('LE' + 'AK')",
        "import torch; raise SystemExit('LE' + 'AK')",
        "import os; raise SystemExit('LE' + 'AK' + os.environ['USER'])",
    ],
)
def test_source_reads_and_reaches_nothing_outside_of_the_box(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "somebody")
    words = refusal(TRITON_SOURCE + line + "\n")
    assert "does not compile" in words and "LEAK" not in words and "root:" not in words
    assert not Path("/tmp/autokern-escaped").exists()


def test_source_that_answers_for_the_compiler_is_held_to_the_cubin() -> None:
    """A source may lie about metadata, not about the bytes."""
    lie = """
import atexit, json
def lie():
    said = json.load(open("answer.json")); said["soft"]["num_warps"] = 8; json.dump(said, open("answer.json", "w"))
atexit.register(lie)
"""
    assert "block (256, 1, 1), the kernel requires (128, 1, 1)" in refusal(TRITON_SOURCE + lie)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("import atexit; atexit.register(lambda: open('answer.json', 'w').write('{'))", "disturbed the compiler's answer"),
        ("import atexit, os; atexit.register(lambda: os.unlink('kernel.cubin'))", "made no kernel.cubin"),
        ("import atexit, os; atexit.register(lambda: (os.unlink('kernel.cubin'), os.symlink('/etc/passwd', 'kernel.cubin')))",
         "made no kernel.cubin"),
        ("import atexit; atexit.register(lambda: open('kernel.cubin', 'wb').write(b'no cubin'))", "malformed"),
        ("x = bytearray(1 << 40)", "MemoryError"),
    ],
)  # fmt: skip
def test_source_that_disturbs_the_build_is_refused(line: str, rule: str) -> None:
    assert rule in refusal(TRITON_SOURCE + line + "\n")


def test_source_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_autokern.build.boxed_python.Limits", lambda: Limits(cpu_seconds=3, wall_seconds=15))
    words = refusal(TRITON_SOURCE + "while True: pass\n")
    assert "stopped" in words or "ended" in words


def test_source_that_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_autokern.build.boxed_python.Limits", lambda: Limits(wall_seconds=4))
    assert "ran past 4 s and was ended" in refusal(TRITON_SOURCE + "import time\ntime.sleep(1000)\n")


def test_missing_triton_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_toolkit.find_triton.cache_clear()
    monkeypatch.setattr(cuda_toolkit, "_package", lambda name: None)
    with pytest.raises(ToolchainError, match=r"pip install torch_autokern\[cuda\]"):
        compile_triton(triton())
    cuda_toolkit.find_triton.cache_clear()
