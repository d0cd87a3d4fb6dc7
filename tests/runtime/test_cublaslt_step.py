"""A plan's `cublaslt` step without a GPU: what is refused of it, what its numbers mean, and what a library is asked for it (a
fake one that writes down the calls)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cublaslt_samples import CASES, by_hand, case, gpu_key

from torch_autokern.build.compile_cuda import CUBIN_BLOB
from torch_autokern.errors import OtherLibraryError, PlanError
from torch_autokern.judge.workspaces import exposed
from torch_autokern.ops import SPECS
from torch_autokern.runtime import cublaslt
from torch_autokern.runtime.cubin_rules import check_cubin
from torch_autokern.runtime.kernel import load_cpu_kernel
from torch_autokern.runtime.plan import (
    CublasLtAlgorithm,
    CublasLtMatrix,
    CublasLtStep,
    InputArg,
    LaunchPlan,
    OutputArg,
    Workspace,
    WorkspaceArg,
    decode_plan,
    encode_plan,
    validate,
)
from torch_autokern.search.templates import matmul_cublaslt
from torch_autokern.store.key import KernelKey, Target

ALGORITHM = CublasLtAlgorithm(66, 20, 3, 2, 1, 4, 36, 7, 8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def key_of(name: str, dtype: torch.dtype = torch.bfloat16, precision: str = "ieee") -> KernelKey:
    return gpu_key(*case(name, dtype), precision)


def step_of(key: KernelKey) -> CublasLtStep:
    step = matmul_cublaslt.product_step(key, 130101)
    assert step is not None
    room = {"workspace": WorkspaceArg("room"), "workspace_bytes": 3000, "algorithm": ALGORITHM}
    return msgspec.structs.replace(step, **room)


def plan_of(step: CublasLtStep, room_bytes: int = 3256) -> LaunchPlan:
    return LaunchPlan(1, (step,), (Workspace("room", room_bytes),))


MM = step_of(key_of("mm"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_its_numbers_describe_the_call(name: str, dtype: torch.dtype) -> None:
    op, tensors, scalars = case(name, dtype)
    key = gpu_key(op, tensors, scalars)
    step = step_of(key)
    plan = decode_plan(encode_plan(plan_of(step)))
    assert plan.steps == (step,)
    cublaslt.check_step(step, key)
    truth = SPECS[op].reference(tensors, scalars)[0]
    layout = key.outputs[0]
    assert layout is not None
    result = torch.empty_strided(layout.sizes, layout.strides, dtype=torch.float64)
    by_hand(step, tensors, result)
    assert torch.allclose(result, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["addmm row", "addmm row of a matrix", "addmm matrix"])
def test_a_row_of_addends_is_the_bias_and_a_matrix_is_c(name: str) -> None:
    step = step_of(key_of(name))
    assert (step.bias is None, step.addend is None) == (name.endswith("addmm matrix"), not name.endswith("addmm matrix"))


def test_float32_is_rounded_to_tf32_only_where_the_key_allows_it() -> None:
    assert step_of(key_of("mm", torch.float32)).compute == "float32"
    assert step_of(key_of("mm", torch.bfloat16, "tf32")).compute == "float32"
    fast = step_of(key_of("mm", torch.float32, "tf32"))
    assert fast.compute == "tf32"
    cublaslt.check_step(fast, key_of("mm", torch.float32, "tf32"))
    with pytest.raises(PlanError, match="rounds to tf32"):
        cublaslt.check_step(fast, key_of("mm", torch.float32))
    assert matmul_cublaslt.product_step(key_of("mm", torch.float32, "bf16"), 1) is None


@pytest.mark.parametrize(
    ("op", "tensors", "scalars"),
    [
        ("mm", [torch.zeros(8, 24)[:, ::2], torch.zeros(12, 4)], {}),
        ("mm", [torch.zeros(1, 8).expand(8, 8), torch.zeros(8, 4)], {}),
        ("addmm", [torch.zeros(8, 1), torch.zeros(8, 8), torch.zeros(8, 4)], {"beta": 1, "alpha": 1}),
        ("addmm", [torch.zeros(4), torch.zeros(8, 8), torch.zeros(8, 4)], {"beta": 0.5, "alpha": 1}),
        ("mm", [torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 4, dtype=torch.float64)], {}),
    ],
)
def test_no_step_where_cublaslt_has_no_word(op: str, tensors: list[torch.Tensor], scalars: dict[str, Any]) -> None:
    assert matmul_cublaslt.product_step(gpu_key(op, tensors, scalars), 1) is None


def test_nothing_is_proposed_for_a_gpu_that_is_not_here() -> None:
    assert matmul_cublaslt.propose(key_of("mm"), Target("cuda", "a GPU of somebody else", "sm_90a", 0)) == []


def matrix(**changes: Any) -> CublasLtMatrix:
    return msgspec.structs.replace(MM.a, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": matrix(rows=15)}, "is not 16 x 8"),
        ({"a": matrix(transposed=True)}, "is not 16 x 8"),
        ({"a": matrix(leading=15)}, "elements apart"),
        ({"a": matrix(columns=0)}, "elements apart"),
        ({"a": matrix(leading=1 << 40)}, "elements apart"),
        ({"a": matrix(batch_stride=-1)}, "batches"),
        ({"a": matrix(base=InputArg(0, -2))}, "negative offset"),
        ({"a": matrix(base=InputArg(24))}, "out of range"),
        ({"a": matrix(base=WorkspaceArg("room", 2500))}, "a needs 768 bytes from 2500"),
        ({"a": matrix(base=WorkspaceArg("hall"))}, "not declared"),
        ({"batches": 0}, "0 batches"),
        ({"d": msgspec.structs.replace(MM.d, base=InputArg(0))}, "write to an input"),
        ({"d": msgspec.structs.replace(MM.d, transposed=True)}, "is not 16 x 8"),
        ({"alpha": float("nan")}, "finite in fp32"),
        ({"alpha": 1e39}, "finite in fp32"),
        ({"beta": 1.0}, "beta 0 without an addend"),
        ({"compute": "tf32"}, "not bfloat16"),
        ({"workspace_bytes": 3002}, "workspace needs 3257 bytes"),
        ({"workspace": None}, "bytes of workspace"),
        ({"workspace_bytes": 0}, "bytes of workspace"),
        ({"workspace": WorkspaceArg("hall")}, "not declared"),
        ({"algorithm": msgspec.structs.replace(ALGORITHM, id=1 << 31)}, "does not fit"),
        ({"algorithm": msgspec.structs.replace(ALGORITHM, cluster_shape=1 << 16)}, "does not fit"),
        ({"algorithm": msgspec.structs.replace(ALGORITHM, tile=-1)}, "does not fit"),
        ({"algorithm": msgspec.structs.replace(ALGORITHM, split_k=1 << 30)}, "parts; at most 1024"),
    ],
)
def test_a_step_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    validate(plan_of(MM))
    with pytest.raises(PlanError, match=words):
        validate(plan_of(msgspec.structs.replace(MM, **changes)))


@pytest.mark.parametrize(
    ("old", "new"), [(b'"reduction":2', b'"reduction":4'), (b'"compute":"float32"', b'"compute":"16f"'), (b"bfloat16", b"int8")]
)
def test_words_outside_the_vocabulary_are_no_plan(old: bytes, new: bytes) -> None:
    raw = encode_plan(plan_of(MM))
    assert old in raw
    with pytest.raises(PlanError, match="not a launch plan"):
        decode_plan(raw.replace(old, new))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"a": matrix(base=InputArg(1, 2))}, "a reaches byte 770 of a tensor of 768"),
        ({"a": matrix(leading=17)}, "a reaches byte 814"),
        ({"batches": 2, "a": matrix(batch_stride=1)}, "a reaches byte 770"),
        ({"d": msgspec.structs.replace(MM.d, leading=17)}, "d reaches byte 270 of a tensor of 256"),
        ({"d": msgspec.structs.replace(MM.d, base=OutputArg(1))}, "output 1, which mm does not have"),
        ({"a": matrix(base=InputArg(2))}, "input 2, which mm does not have"),
        ({"bias": InputArg(0, 380)}, "bias reaches byte 412 of a tensor of 384"),
        ({"workspace": OutputArg(0)}, "workspace reaches byte 3255 of a tensor of 256"),
        ({"dtype": "float16"}, "a is float16; mm has bfloat16"),
    ],
)
def test_a_step_that_leaves_the_keys_tensors(changes: dict[str, Any], words: str) -> None:
    key = key_of("mm")
    cublaslt.check_step(MM, key)
    step = msgspec.structs.replace(MM, **changes)
    validate(plan_of(step))
    with pytest.raises(PlanError, match=words):
        cublaslt.check_step(step, key)


def test_a_strided_operand_is_held_to_its_own_end() -> None:
    key = key_of("mm rows apart")
    step = step_of(key)
    cublaslt.check_step(step, key)
    longer = msgspec.structs.replace(step.b, columns=step.b.columns + 1)
    wider = msgspec.structs.replace(step.d, columns=longer.columns)
    with pytest.raises(PlanError, match="b reaches byte"):
        cublaslt.check_step(msgspec.structs.replace(step, b=longer, d=wider), key)


def test_the_judge_holds_its_workspace() -> None:
    key = key_of("addmm row")
    plan, seen = exposed(plan_of(step_of(key)), key)
    validate(plan)
    (step,) = plan.steps
    assert isinstance(step, CublasLtStep) and step.workspace == OutputArg(1) and step.bias == InputArg(0)
    cublaslt.check_step(step, seen)


def test_it_is_no_step_of_a_cpu() -> None:
    from tiny_kernels import artifact

    op, tensors, scalars = case("mm", torch.float32)
    plan = plan_of(step_of(gpu_key(op, tensors, scalars)))
    with pytest.raises(PlanError, match="GPU steps"):
        load_cpu_kernel(artifact().binary, artifact().identity, plan, SPECS[op].key(tensors, scalars))


def test_its_cubin_holds_nothing_that_a_plan_could_break() -> None:
    from gpu_sources import needs_nvrtc

    from torch_autokern.build.candidate import Candidate
    from torch_autokern.build.compile_cuda import compile_cuda

    needs_nvrtc()
    plan = plan_of(MM)
    made = compile_cuda(Candidate("cuda", matmul_cublaslt.SOURCE, plan, "", ""), allow_weak_box=True)
    assert made.resources == {} and check_cubin(made.blobs()[CUBIN_BLOB], plan, "sm_90a") == ()


# A process of its own: the library that it finds first is the one that it keeps.
ASK = """
import ctypes, json, sys
fake = ctypes.CDLL(sys.argv[1])
fake.fake_text.restype = ctypes.c_char_p
import test_cublaslt_step as t
json.dump([ask(fake) for ask in (t.ask_for_products, t.ask_for_refusals, t.ask_for_offers)], sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the `ask_for` functions return in a process that has loaded the fake library under the name of PyTorch's."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or torch.version.cuda is not None:
        pytest.skip("needs a C compiler and a PyTorch without CUDA, which would bring the real library")
    made = tmp_path_factory.mktemp("fake") / "libfake.so"
    source = Path(__file__).with_name("fake_cublaslt.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcublasLt.so.13", source, "-o", made], check=True)
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = f"import sys\nsys.path[:0] = {folders!r}\n{ASK}"
    done = subprocess.run([sys.executable, "-c", code, made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Any] = msgspec.json.decode(done.stdout)
    return found


def refusal_of(step: CublasLtStep, key: KernelKey) -> str:
    try:
        cublaslt.native_product(step, key, 0)
    except (OtherLibraryError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "made"


def said(library: ctypes.CDLL) -> list[str]:
    return str(library.fake_text().decode()).splitlines()


def ask_for_products(library: ctypes.CDLL) -> list[list[str]]:
    """Of a product with a bias, and of one with an addend in batches: what making, running twice and dropping it says."""
    told = []
    for name in ("addmm row", "baddbmm"):
        key = key_of(name)
        said(library)
        product = cublaslt.native_product(step_of(key), key, 0)
        lines = [*said(library), "run"]
        product.run([256, 512, 768, 1024, 1280, 1537], 7)
        lines += said(library)
        del product
        told.append([*lines, "drop", *said(library)])
    return told


def test_a_step_asks_the_library_what_it_says(answers: list[Any]) -> None:
    row, batched = answers[0]
    # 14: CUDA_R_16BF; 68: CUBLAS_COMPUTE_32F; 7 = 4: the bias epilogue; 8: the bias's address, before a launch its alignment.
    assert row[:9] == [
        "create", "O 68 0", "O7=4/4", "O8=16/8", "L 14 16 x 24 by 16", "L 14 24 x 8 by 24", "L 14 16 x 8 by 16",
        "L 14 16 x 8 by 16", "init 68 0 14 14 14 14 66",
    ]  # fmt: skip
    # Without an addend C is D; the workspace starts on 256 bytes.
    call = "matmul 1 0 0x100 0x200 0x300 0x300 room 0x700 3000 stream 0x7 algo 66 20 3 2 1 4 36 7 8"
    assert row[9:] == ["run", "O 68 0", "O7=4/4", "O8=1280/8", call, "-O", "drop", "-L", "-L", "-L", "-L", "-O"]
    # 5: batches; 6: elements from one to the next. The handle is made once.
    assert batched[0] == "O 68 0" and batched[1:4] == ["L 14 16 x 24 by 16", "L5=3/4", "L6=384/8"]
    assert "matmul -2 0.5 0x100 0x200 0x400 0x300 room 0x700 3000 stream 0x7 algo 66 20 3 2 1 4 36 7 8" in batched


def ask_for_refusals(_: ctypes.CDLL) -> list[str]:
    """Of steps whose algorithm is not here, or not of this version."""
    key = key_of("mm")
    few = msgspec.structs.replace(ALGORITHM, split_k=4)
    steps = [
        msgspec.structs.replace(MM, version=120805),
        msgspec.structs.replace(MM, algorithm=msgspec.structs.replace(ALGORITHM, id=99)),
        msgspec.structs.replace(MM, algorithm=msgspec.structs.replace(ALGORITHM, tile=77)),
        msgspec.structs.replace(MM, algorithm=few),
        MM,
    ]
    words = [refusal_of(step, key) for step in steps]
    product = cublaslt.native_product(msgspec.structs.replace(MM, alpha=13.0), key, 0)
    with pytest.raises(RuntimeError, match=r"cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED \(15\)"):
        product.run([256, 512, 768, 0, 0, 1536], 7)
    return words


def test_what_this_cublaslt_does_not_have_is_refused_in_words(answers: list[Any]) -> None:
    other, number, tile, workspace, made = answers[1]
    assert other.startswith("OtherLibraryError: the algorithm was chosen under cuBLASLt 120805, this PyTorch has 130101")
    assert "cublasLtMatmulAlgoInit: CUBLAS_STATUS_NOT_SUPPORTED (15)" in number
    assert "does not run here: cublasLtMatmulAlgoCheck: CUBLAS_STATUS_NOT_SUPPORTED (15)" in tile
    assert "needs 4000 bytes of workspace, the plan gives 3000" in workspace
    assert made == "made"


def ask_for_offers(library: ctypes.CDLL) -> list[Any]:
    """What is offered for a product, and what was asked first."""
    key = key_of("mm")
    found = [msgspec.to_builtins([o.algorithm, o.workspace_bytes, o.waves, o.same]) for o in cublaslt.offers(MM, key, 0, 16)]
    return [found, [line for line in said(library) if line.startswith("P")]]


def test_offers_are_what_the_heuristic_names_and_its_numbers_make_again(answers: list[Any]) -> None:
    found, preferences = answers[2]
    assert [(row[0]["tile"], row[0]["split_k"], *row[1:]) for row in found] == [
        (20, 1, 1000, 0.5, True),
        (23, 3, 3000, 0.5, False),
    ]
    # At most 32 MiB, partial sums in fp32, and every address on the 16 bytes that the key promises.
    assert preferences == ["P1=33554432/8", "P3=2/4", "P5=16/4", "P6=16/4", "P7=16/4", "P8=16/4"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a PyTorch with CUDA brings the library")
def test_no_cublaslt_is_said_in_words() -> None:
    with pytest.raises(RuntimeError, match="has loaded no cuBLASLt"):
        cublaslt.native_product(MM, key_of("mm"), 0)
