"""An honest softmax kernel in CUDA C++ for the tests of the GPU judge, for any number of rows and columns."""

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
