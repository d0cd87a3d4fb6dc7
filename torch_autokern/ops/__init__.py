"""What is computed: one `OpSpec` per op family, and the table of all of them."""

from torch_autokern.ops import layer_norm, matmul, softmax
from torch_autokern.ops.spec import OpSpec

SPECS: dict[str, OpSpec] = {
    spec.name: spec for spec in sorted((*matmul.SPECS, *softmax.SPECS, *layer_norm.SPECS), key=lambda s: s.index)
}

__all__ = ["SPECS", "OpSpec"]
