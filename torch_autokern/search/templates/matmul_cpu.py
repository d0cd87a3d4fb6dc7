"""`mm`, `addmm`, `bmm` and `baddbmm` on the CPU, float32 and bfloat16, for any strides of the operands.

Where stock leaves something: shapes are constants here, so small ones cost no set-up; the addend is added as a tile leaves the
registers, not copied ahead; columns that no vector divides are computed by vectors that overlap; bfloat16 is widened in
registers where the CPU has no bfloat16 products of its own. The loops follow Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication" (2008): a panel of B stays in L1, a block of A in L2.

Forms: `rows` cuts the range into tiles of rows; B is read as it is, packed on the stack, or packed by a step of its own into
a workspace. `panels` cuts it into panels of columns, all rows of each. `dot` runs along K, for few rows and operands that are
contiguous there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import (
    MAX_WORKSPACE_BYTES,
    PLAN_VERSION,
    CpuStep,
    InputArg,
    LaunchPlan,
    OutputArg,
    PointerArg,
    Workspace,
    WorkspaceArg,
)
from torch_autokern.search.templates import matmul_cpu_code as code
from torch_autokern.search.templates.cpp_common import (
    AUTHOR,
    END,
    L1_BYTES,
    L2_BYTES,
    SCRATCH_BYTES,
    entry,
    prelude,
    registers,
    vector_widths,
)
from torch_autokern.search.templates.matmul_cpu_layout import Product, product_of
from torch_autokern.store.key import KernelKey, Target

Packing = Literal["none", "stack", "workspace"]
_PIECE = 1 << 17  # multiply-adds that a thread should get at least: about 3 us, what waking it costs
_DOT_ROWS = 12  # above that, packing B is repaid
_IDEAS = {
    "matmul_rows": "Tiles of {rows} rows by {vectors} vectors, by rows; B packed: {packing}, A copied: {copies}; K by {kc}.",
    "matmul_panels": "Column panels of {vectors} vectors, all rows of each, {rows} at a time; B packed: {packing}.",
    "matmul_dot": "Vectors along K: {rows} rows by {vectors} columns of sums, for few rows.",
}


@dataclass(frozen=True)
class Tile:
    """Rows and vectors (or columns, of a dot product) of a register tile, with the vector width in bytes."""

    rows: int
    vectors: int
    width: int

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return self.width // 4


def constants(product: Product, tile: Tile, **flags: object) -> str:
    """The numbers of a product as C++ constants, and the `flags` that a form adds."""
    addend = product.addend
    element = "float" if product.dtype == "float32" else "uint16_t"
    copies, packed = bool(flags.get("COPIES")), bool(flags.get("PACKED"))
    numbers = {
        "M": product.m, "N": product.n, "K": product.k,
        "AB": product.a.batch, "AR": product.a.row, "AS": product.a.column,
        "BB": product.b.batch, "BS": product.b.row, "BC": product.b.column,
        "OB": product.out.batch, "OR": product.out.row,
        "SB": addend.batch if addend else 0, "SR": addend.row if addend else 0, "SC": addend.column if addend else 0,
        "A_ROW": product.k if copies else product.a.row, "A_STEP": 1 if copies else product.a.column,
    }  # fmt: skip
    lines = [f"constexpr int64_t {name} = INT64_C({value});" for name, value in numbers.items()]
    lines += [f"constexpr int MR = {tile.rows}, NV = {tile.vectors};"]
    lines += [f"constexpr float ALPHA = {_float(product.alpha)}, BETA = {_float(product.beta)};"]
    lines += [f"constexpr bool ADDS = {str(addend is not None).lower()};"]
    for name, value in flags.items():
        kind = "bool" if isinstance(value, bool) else "int64_t"
        lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
    lines += [f"typedef {element} T;", f"typedef {'float' if copies else element} TA;"]
    lines += [f"typedef {'float' if packed else element} TB;"]
    return "\n".join(lines) + "\n"


def _float(value: float) -> str:
    return f"(float){value.hex()}"


def _grain(product: Product, items: int) -> int:
    each = max(1, product.batches * product.m * product.n * product.k // items)
    return max(1, -(-_PIECE // each))


def _pointers(product: Product) -> tuple[PointerArg, ...]:
    found: tuple[PointerArg, ...] = (InputArg(product.a.index), InputArg(product.b.index), OutputArg(0))
    return (*found, InputArg(0)) if product.addend else found


def _candidate(name: str, source: str, plan: LaunchPlan, tile: Tile, **parameters: Parameter) -> Candidate:
    used: dict[str, Parameter] = {"rows": tile.rows, "vectors": tile.vectors, "width": tile.width, **parameters}
    return Candidate("cpp", source, plan, _IDEAS[name].format(**used), AUTHOR, name, used)


def _block_tiles(product: Product, tile: Tile) -> int:
    """Row tiles of a block of A: half of what L2 holds."""
    return max(1, min(-(-product.m // tile.rows), L2_BYTES // 2 // (4 * product.k * tile.rows)))


def _panels(product: Product, tile: Tile) -> int:
    return -(-product.n // (tile.vectors * tile.lanes))


def rows(product: Product, tile: Tile, packing: Packing, kc: int, copies: bool) -> Candidate:
    """The range is row tiles of all batches; `kc` elements of K at a time (`product.k`: all at once). `copies`: a block of A is
    copied to dense float32 rows before it is used, as every block of bfloat16 is."""
    block = _block_tiles(product, tile)
    place = 4 if product.addend else 3
    flags = {
        "KC": kc, "BLOCK_TILES": block, "PLACE": place, "COPIES": copies, "PACKED": packing != "none",
        "STACK_PACKED": packing == "stack",
    }  # fmt: skip
    lanes = tile.lanes
    body = code.transpose(lanes) + code.TILES.replace("@UNROLL@", "4") + (code.PACKING if packing != "none" else "")
    if packing == "none":
        body += "AK_INLINE void pack_panel(const T*, float*, int64_t) {}\n"
    source = prelude(tile.width) + constants(product, tile, **flags) + code.ELEMENTS + body + END
    source += entry("run", code.ROWS_ENTRY)
    items = product.batches * -(-product.m // tile.rows)
    arguments = _pointers(product)
    steps: tuple[CpuStep, ...] = ()
    workspaces: tuple[Workspace, ...] = ()
    if packing == "workspace":
        panels = product.batches * _panels(product, tile)
        packed_bytes = 4 * panels * product.k * tile.vectors * lanes
        source += entry("pack", code.PACK_ENTRY)
        grain = max(1, -(-(1 << 14) // (product.k * tile.vectors * lanes)))
        workspaces = (Workspace("packed", packed_bytes),)
        steps = (CpuStep("pack", panels, grain, (InputArg(product.b.index), WorkspaceArg("packed"))),)
        arguments = (*arguments, WorkspaceArg("packed"))
    plan = LaunchPlan(PLAN_VERSION, (*steps, CpuStep("run", items, _grain(product, items), arguments)), workspaces)
    return _candidate("matmul_rows", source, plan, tile, packing=packing, kc=kc, copies=copies)


def panels(product: Product, tile: Tile, packing: Packing, kc: int) -> Candidate:
    """The range is column panels of all batches, every row of each; B is packed a panel at a time, or not."""
    copies = product.dtype != "float32"
    flags = {"KC": kc, "BLOCK_TILES": _block_tiles(product, tile), "COPIES": copies, "PACKED": packing != "none"}
    body = code.transpose(tile.lanes) + code.TILES.replace("@UNROLL@", "4") + (code.PACKING if packing != "none" else "")
    if packing == "none":
        body += "AK_INLINE void pack_panel(const T*, float*, int64_t) {}\n"
    source = prelude(tile.width) + constants(product, tile, **flags) + code.ELEMENTS + body + END
    source += entry("run", code.PANELS_ENTRY)
    items = product.batches * _panels(product, tile)
    plan = LaunchPlan(PLAN_VERSION, (CpuStep("run", items, _grain(product, items), _pointers(product)),))
    return _candidate("matmul_panels", source, plan, tile, packing=packing, kc=kc)


def dot(product: Product, tile: Tile) -> Candidate:
    """The range is groups of `tile.vectors` columns of all batches; both operands are contiguous along K."""
    source = prelude(tile.width) + constants(product, tile, C=tile.vectors) + code.ELEMENTS + code.DOT + END
    source += entry("run", code.DOT_ENTRY)
    items = product.batches * -(-product.n // tile.vectors)
    plan = LaunchPlan(PLAN_VERSION, (CpuStep("run", items, _grain(product, items), _pointers(product)),))
    return _candidate("matmul_dot", source, plan, tile)


def _tile_cost(rows: int, vectors: int, k: int) -> float:
    """Cycles of a register tile for one element of K on a core with two multiply-add and two load units and a latency of 4;
    loading, finishing and storing it are spread over K. The margins were fitted to a Zen 3 core: loads reach 87 % of their
    rate, eight sums in flight hide a latency of four only nearly, and the loop costs 0.4."""
    return max(rows * vectors / 2, 0.575 * (rows + vectors) + 0.3, 4.8) + 0.4 + (10 + 2 * rows * vectors) / k


def _cost(product: Product, tile: Tile) -> float:
    """Model of the cycles that a batch takes with a tile: whole and last tiles, whole and last panels."""
    whole_panels, rest = divmod(product.n, tile.vectors * tile.lanes)
    whole_tiles, rest_rows = divmod(product.m, tile.rows)
    kinds = [(whole_panels, tile.vectors), (1 if rest else 0, -(-rest // tile.lanes))]
    total = 0.0
    for count, vectors in kinds:
        one = whole_tiles * _tile_cost(tile.rows, vectors, product.k)
        one += _tile_cost(rest_rows, vectors, product.k) if rest_rows else 0
        total += count * one * product.k
    return total


def tiles(product: Product, target: Target, width: int) -> list[Tile]:
    """Register tiles of a vector width, one for each number of vectors, best guess first. Registers that hold no sum hold the
    vectors of B and one element of A."""
    spare = registers(target) - 1
    best: dict[int, Tile] = {}
    most = -(-product.n * 4 // width)
    for vectors in range(1, min(most, 6) + 1):
        for count in range(1, min(product.m, spare // vectors, 14) + 1):
            if count * vectors + vectors > spare:
                continue
            tile = Tile(count, vectors, width)
            if vectors not in best or _cost(product, tile) < _cost(product, best[vectors]):
                best[vectors] = tile
    return sorted(best.values(), key=lambda tile: _cost(product, tile))


def _k_block(product: Product, tile: Tile) -> int:
    """How much of K at a time, in equal blocks: a panel of B in half of L1, and chains no longer than those of stock's products
    (192, by their errors: one long chain errs several times as much as MKL)."""
    most = min(192, max(64, L1_BYTES // 2 // (4 * tile.vectors * tile.lanes)))
    even = -(-product.k // -(-product.k // most))
    return product.k if product.k <= most else -(-even // 8) * 8


def _propose_tile(product: Product, tile: Tile, target: Target) -> list[Candidate]:
    """Every form that fits a tile, best guess first."""
    row_tiles = product.batches * -(-product.m // tile.rows)
    panel_bytes = 4 * product.k * tile.vectors * tile.lanes
    packed_bytes = panel_bytes * _panels(product, tile)
    widen = product.dtype != "float32"
    plain = product.b.column == 1
    kc = _k_block(product, tile)
    by_panels: list[Candidate] = []
    few_rows = not widen or 4 * product.m * product.k <= SCRATCH_BYTES
    # A last panel of less than a vector would overlap with the panel before, which may be another thread's.
    own_columns = not 0 < product.n % (tile.vectors * tile.lanes) < tile.lanes <= product.n
    if few_rows and own_columns and product.batches * _panels(product, tile) >= 2 * target.threads:
        if plain and not widen:
            by_panels.append(panels(product, tile, "none", kc))
        elif panel_bytes <= SCRATCH_BYTES:
            by_panels.append(panels(product, tile, "stack", kc))
    by_rows: list[Candidate] = []
    # Rows of a transposed A are a cache line an element: a copy of a block is repaid by the panels that read it.
    turned = not widen and product.a.column != 1 and product.n >= 64 and product.k * registers(target) <= SCRATCH_BYTES
    copies = widen or turned
    if plain and not copies:
        by_rows.append(rows(product, tile, "none", kc, copies))
    if packed_bytes <= SCRATCH_BYTES // 2 and (product.batches > 1 or packed_bytes <= L1_BYTES):
        by_rows.append(rows(product, tile, "stack", kc, copies))
    elif packed_bytes * product.batches <= MAX_WORKSPACE_BYTES:
        by_rows.append(rows(product, tile, "workspace", kc, copies))
    if plain and turned:
        by_rows.append(rows(product, tile, "none", kc, False))
    return by_panels + by_rows if row_tiles < 8 * target.threads else by_rows + by_panels


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for a product, best guess first; [] for another op, and where the layout is not one of `product_of`'s."""
    product = product_of(key)
    if product is None:
        return []
    # One row tile of widened rows must fit the stack.
    if product.dtype != "float32" and product.k * registers(target) > SCRATCH_BYTES:
        return []
    found: list[Candidate] = []
    widths = vector_widths(target)
    if product.a.column == 1 and product.b.row == 1 and product.m <= _DOT_ROWS and product.k >= 2 * widths[0] // 4:
        count = min(product.m, 3)
        found.append(dot(product, Tile(count, 8 if count == 1 else 4, widths[0])))
    # Where few vectors make a row, how they are divided matters, and the model is least sure.
    for tile in tiles(product, target, widths[0])[: 3 if product.n <= 64 else 2]:
        found += _propose_tile(product, tile, target)[:2]
    if len(widths) > 1:
        found += _propose_tile(product, tiles(product, target, widths[1])[0], target)[:1]
    return found[:8]
