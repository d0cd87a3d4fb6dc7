"""Softmax kernels in CUDA C++ for the GPU judge: one honest one, and cheats that are honest but for a line."""

from __future__ import annotations

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile import compile_candidate
from torch_autokern.runtime.plan import InputArg, IntArg, KernelStep, LaunchPlan, OutputArg, Workspace, WorkspaceArg
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey, TensorKey

ROWS, COLUMNS = 256, 1000  # a warp a row, with a tail: 1000 is no multiple of 32

_ROW = r"""
#define INF __int_as_float(0x7f800000)
// A warp a row; three passes, the second and third from L1.
__device__ void row(const float* x, float* y, int n) {
  float top = -INF;
  double sum = 0;  // a warp's sum of a long row in float would be less accurate than stock's
  for (int i = threadIdx.x; i < n; i += 32) top = MAX(top, x[i]);
  for (int o = 16; o; o /= 2) top = MAX(top, __shfl_xor_sync(~0u, top, o));
  for (int i = threadIdx.x; i < n; i += 32) sum += expf(x[i] - top);
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  for (int i = threadIdx.x; i < n; i += 32) y[i] = (float)(expf(x[i] - top) / sum);
}
extern "C" __global__ void softmax(const float* x, float* y, float* room, int n) {
  const long long r = blockIdx.x;
  @BODY@
}
"""
_MAX = "#define MAX(a, b) fmaxf(a, b)\n"
_HONEST = "row(x + r * n, y + r * n, n);"
# name: (body, reasons that may refuse it)
CHEATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "writes_nothing": ("", ("not_written",)),
    "zeros": ("for (int i = threadIdx.x; i < n; i += 32) y[r * n + i] = 0;", ("wrong_value",)),
    "drops_the_tail": ("row(x + r * n, y + r * n, n / 32 * 32);", ("not_written", "wrong_value")),
    "skips_a_row": ("if (r != 7) row(x + r * n, y + r * n, n);", ("not_written",)),
    "one_row_for_all": ("row(x, y + r * n, n);", ("wrong_value",)),
    "writes_past_the_end": (_HONEST + " if (r == gridDim.x - 1 && threadIdx.x == 0) y[(r + 1) * n] = 1;", ("wrote_outside",)),
    "writes_before_the_start": (_HONEST + " if (r == 0 && threadIdx.x == 0) y[-1] = 1;", ("wrote_outside",)),
    "writes_its_input": (_HONEST + " if (threadIdx.x == 0) ((float*)x)[r * n] += 1;", ("wrote_input", "stale_result")),
    "reads_past_the_end": ("row(x + r * n, y + r * n, n); if (threadIdx.x == 0) y[r * n] += 0 * x[gridDim.x * n];",
                           ("wrong_nonfinite", "wrong_value")),
    "uses_a_stale_workspace": ("row(x + r * n, y + r * n, n); if (threadIdx.x == 0) y[r * n] *= room[0] == 0 ? 1 : 1.5f;",
                               ("wrong_value", "stale_result", "not_deterministic", "wrong_nonfinite")),
    "writes_past_its_workspace": (_HONEST + " if (r == 0 && threadIdx.x == 0) room[1024] = 1;", ("wrote_outside",)),
    "touches_nobodys_memory": (_HONEST + " if (r == 3) y[1ll << 40] = 1;", ("crashed",)),
    "traps": (_HONEST + ' if (r == 3) asm volatile("trap;");', ("crashed",)),
    "never_ends": (_HONEST + " if (r == 3) while (clock64() != 1) {}", ("hung",)),
}  # fmt: skip
HIDES_NAN = "#define MAX(a, b) fmaxf(a, b)\n#define expf(v) (isnan(v) ? 0.0f : __expf(v))\n"


def key(rows: int = ROWS, columns: int = COLUMNS) -> KernelKey:
    """Softmax over the last dimension of a dense float32 matrix."""
    x = TensorKey("float32", (rows, columns), (columns, 1), 16)
    return KernelKey("_softmax", "cuda", (x,), {"dim": 1, "half_to_float": False}, (x,))


def candidate(body: str = _HONEST, head: str = _MAX, wanted: KernelKey | None = None) -> Candidate:
    """One block of a warp for each row."""
    first = (wanted or key()).tensors[0]
    assert first is not None
    rows, columns = first.sizes
    args = (InputArg(0), OutputArg(0), WorkspaceArg("room"), IntArg(columns, 32))
    step = KernelStep("softmax", (rows, 1, 1), (32, 1, 1), args)
    plan = LaunchPlan(1, (step,), (Workspace("room", 4096),))
    return Candidate("cuda", head + _ROW.replace("@BODY@", body), plan, "a warp a row", "tests")


def build(one: Candidate) -> Artifact:
    """For the GPU that is here."""
    return compile_candidate(one, local_target("cuda"))
