"""Work of our op families that never reaches the router: where it hides in a profile, and what would bring it out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

Event = tuple[str, int, float]  # op name as the profiler gives it, calls, own time in us


class HiddenWork(msgspec.Struct, frozen=True):
    """One kind of place where such work hides. `families`: whose work it is; `why` it is not ours and `cure` what would change
    that, both in words. Times are the ops' own (children excluded), `share` is of the whole call; a compiled region's time
    holds everything that was fused into it."""

    kind: str
    families: tuple[str, ...]
    ops: tuple[str, ...]
    calls: int
    time_us: float
    share: float
    why: str
    cure: str


class _Place(msgspec.Struct, frozen=True):
    kind: str
    prefixes: tuple[str, ...]
    families: tuple[str, ...]
    why: str
    cure: str


# Names as PyTorch 2.11 to 2.13 record them; a trailing "*" matches any rest.
_PLACES = (
    _Place(
        "sdpa",
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_scaled_dot_product_flash_attention_backward",
            "aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_cudnn_attention_backward",
            "aten::_flash_attention_forward", "aten::_efficient_attention_forward",
        ),
        ("bmm", "_softmax"),
        "attention fused by PyTorch (sdpa); its softmax and products are not separate calls",
        'ask for separate calls (attn_implementation="eager", SDPBackend.MATH) and compare end to end: fused is often faster',
    ),
    _Place(
        "compiled",
        ("Torch-Compiled Region*", "## Call CompiledFxGraph*", "CompiledFunction*", "graph_*", "cpp_fused_*", "triton_*"),
        ("_softmax", "_log_softmax", "native_layer_norm"),
        "fused by Inductor into kernels of its own; the products that it leaves as calls are served",
        "nothing: what Inductor fuses is faster than calls of ours would be",
    ),
    _Place(
        "frozen",
        ("mkldnn::_linear_pointwise*", "mkldnn::_linear*", "mkl::_mkl_linear", "quantized::linear*", "onednn::qlinear*"),
        ("mm", "addmm"),
        "a linear frozen, packed or quantised into another op (Inductor's freezing, mkldnn)",
        "torch._inductor.config.freezing = False, and compare end to end",
    ),
    _Place(
        "mkldnn",
        ("aten::mkldnn_linear*", "aten::mkldnn_linear_backward*"),
        ("mm", "addmm"),
        "a linear on mkldnn tensors (to_mkldnn)",
        "use plain tensors, and compare end to end",
    ),
    _Place(
        "activation",
        ("aten::_addmm_activation",),
        ("addmm",),
        "a product fused with its activation by the TransformerEncoder fast path",
        "torch.backends.mha.set_fastpath_enabled(False), and compare end to end",
    ),
    _Place(
        "fast path",
        ("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention", "aten::_masked_softmax"),
        ("_softmax",),
        "the fast path of TransformerEncoder and MultiheadAttention: its products are served, its softmax overwrites its input",
        "torch.backends.mha.set_fastpath_enabled(False), and compare end to end",
    ),
    _Place(
        "in place",
        ("aten::addmm_", "aten::baddbmm_"),
        ("addmm", "baddbmm"),
        "an in-place product: its result overwrites an input, which no record proves",
        "call the functional form",
    ),
)  # fmt: skip


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def place_of(name: str) -> str:
    """Why an op of this name hides work of ours; "" where it does not."""
    return next((place.why for place in _PLACES for pattern in place.prefixes if _matches(name, pattern)), "")


def hidden_work(events: Sequence[Event], wall_us: float) -> tuple[HiddenWork, ...]:
    """The places that a profile shows, by falling time."""
    rows = []
    for place in _PLACES:
        found = [event for event in events if any(_matches(event[0], pattern) for pattern in place.prefixes)]
        if not found:
            continue
        time_us = sum(time for _, _, time in found)
        names = tuple(sorted({name for name, _, _ in found}))
        calls = sum(count for _, count, _ in found)
        rows.append(HiddenWork(place.kind, place.families, names, calls, time_us, time_us / wall_us, place.why, place.cure))
    return tuple(sorted(rows, key=lambda row: (-row.time_us, row.kind)))
