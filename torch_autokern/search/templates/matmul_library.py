"""`addmm` and `baddbmm` on the CPU, float32: stock's own product into the result, then the addend by a pass of its own.

Stock copies a broadcast addend over the whole result before its product reads it back. Here the product is written once, and
the addend is added to it afterwards: for machines on which stock's product is ahead of the tiles of `matmul_cpu`.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, InputArg, LaunchPlan, LibraryStep, OutputArg
from torch_autokern.search.templates import matmul_cpu_code as code
from torch_autokern.search.templates.cpp_common import AUTHOR, END, entry, grain_of, prelude, vector_widths
from torch_autokern.search.templates.matmul_cpu import Tile, constants
from torch_autokern.search.templates.matmul_cpu_layout import product_of
from torch_autokern.store.key import KernelKey, Target

NAME = "matmul_library"


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """One candidate for a float32 product with an addend; [] for any other call."""
    product = product_of(key)
    if product is None or product.addend is None or product.dtype != "float32":
        return []
    width = vector_widths(target)[0]
    tile = Tile(1, 1, width)
    source = prelude(width) + constants(product, tile) + code.ELEMENTS + code.EPILOGUE + END + entry("add", code.ADD_ENTRY)
    steps = (
        LibraryStep("mm" if key.op == "addmm" else "bmm", (1, 2)),
        CpuStep("add", product.batches * product.m, grain_of(product.n), (OutputArg(0), InputArg(0))),
    )
    used: dict[str, Parameter] = {"width": width}
    idea = "Stock's product without its addend, which a pass over the rows of the result adds afterwards."
    return [Candidate("cpp", source, LaunchPlan(PLAN_VERSION, steps), idea, AUTHOR, NAME, used)]
