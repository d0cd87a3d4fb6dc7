"""The child of `runtime.smoke`: ``python -m torch_autokern.runtime.smoke_child`` reads records from stdin, loads each kernel
and compares one call with float64; answers are lines of JSON on stdout. It may crash: that is what it is for."""

from __future__ import annotations

import sys

import torch

from torch_autokern.errors import AutokernError, OtherLibraryError
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import OpSpec
from torch_autokern.runtime.smoke import WAITS, SmokeLine
from torch_autokern.store.key import KernelKey, TensorKey, canonical_json
from torch_autokern.store.record import MAX_RECORD_BYTES, StoredRecord, Verdict, decode_record

# Not the judge's limits: far outside of what any accepted kernel does, far inside of what a kernel gone wrong does.
_TIMES_STOCK = 8.0
_ULPS = 64.0
_CHUNKED_ABOVE = 1 << 24
_SEED = 20_240_229


def main() -> None:
    """Answer for every record on stdin."""
    number = 0
    while True:
        head = sys.stdin.buffer.read(12)
        if len(head) < 12:
            return
        body = sys.stdin.buffer.read(min(int.from_bytes(head[:8], "little"), MAX_RECORD_BYTES))
        _answer(number, "start")
        try:
            words = _try(decode_record(body), int.from_bytes(head[8:], "little"))
        except OtherLibraryError as error:
            words = f"{WAITS} {str(error)[:300]}"
        except (AutokernError, KeyError, RuntimeError) as error:
            words = f"{type(error).__name__}: {str(error)[:300]}"
        _answer(number, words)
        number += 1


def _answer(number: int, words: str) -> None:
    sys.stdout.buffer.write(canonical_json(SmokeLine(number, words)) + b"\n")
    sys.stdout.buffer.flush()


def _try(stored: StoredRecord, place: int) -> str:
    from torch_autokern.runtime.session import load_record  # here: the session is none of the parent's business

    record = stored.record
    if record.key.device_type == "cpu":
        torch.set_num_threads(max(1, record.target.threads))
    loaded = load_record(stored, place)
    spec = SPECS[record.key.op]
    device = f"cuda:{place}" if record.key.device_type == "cuda" else "cpu"
    tensors = _inputs(spec, record.key, device)
    copies = [None if t is None else t.clone() for t in tensors]
    results = loaded.run(tensors)
    if any(t is not None and c is not None and not torch.equal(t, c) for t, c in zip(tensors, copies, strict=True)):
        return "it writes its inputs"
    stock = spec.stock(tensors, record.key.scalars)
    for index, (mine, theirs) in enumerate(zip(results, stock, strict=False)):
        if mine is not None and not _is_near(spec, record.key, record.verdict, tensors, index, mine, theirs):
            return f"output {index} is far from stock's"
    return "ok"


def _inputs(spec: OpSpec, key: KernelKey, device: str) -> list[torch.Tensor | None]:
    """Standard normal numbers in the key's layouts; results of a forward pass where a backward op takes them."""
    generator = torch.Generator(device).manual_seed(_SEED)
    tensors = [None if t is None else _laid_out(t, device, generator) for t in key.tensors]
    names = [arg.name for arg in spec.args if "tensor" in arg.kind]
    if "output" in names:
        output, dim = tensors[names.index("output")], int(key.scalars["dim"])  # type: ignore[arg-type]
        assert output is not None
        output.copy_(torch.log_softmax(output, dim) if "log" in spec.name else torch.softmax(output, dim))
    if "rstd" in names:
        rstd = tensors[names.index("rstd")]
        assert rstd is not None
        rstd.abs_().add_(0.5)
    return tensors


def _laid_out(layout: TensorKey, device: str, generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty_strided(layout.sizes, layout.strides, dtype=getattr(torch, layout.dtype), device=device)
    if not tensor.is_floating_point():
        return tensor.zero_()
    return tensor.copy_(torch.randn(layout.sizes, generator=generator, device=device))


def _is_near(
    spec: OpSpec, key: KernelKey, verdict: Verdict, tensors: list[torch.Tensor | None], index: int, mine: torch.Tensor,
    stock: torch.Tensor,
) -> bool:  # fmt: skip
    rounding = torch.finfo(mine.dtype).eps * _ULPS
    if mine.numel() > _CHUNKED_ABOVE:  # the float64 truth of such a call would take gigabytes of a user's machine
        size = float(stock.float().abs().mean())
        near = torch.isclose(
            mine.float(), stock.float(), rtol=max(1e-3, rounding, verdict.rtol), atol=1e-2 * size + verdict.atol
        )
        return bool(near.all())
    truth = spec.reference(tensors, key.scalars)
    scale = spec.scale(truth, tensors, key.scalars)[index].clamp(min=1e-300)
    error, of_stock = ((t.double() - truth[index]).abs() for t in (mine, stock))
    allowed = (_TIMES_STOCK * float((of_stock / scale).max()) + rounding) * scale
    if verdict.accuracy_class == "tolerance":
        allowed = allowed + verdict.atol + verdict.rtol * truth[index].abs()
    return bool((error <= allowed).all())


if __name__ == "__main__":
    main()
