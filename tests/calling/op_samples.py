"""PyTorch's own samples (`OpInfo`) of the intercepted ops, in a process of their own: importing them changes torch's flags.

``python tests/calling/op_samples.py LIMIT`` prints one JSON object with two reports, each with the calls that the router saw,
by op family and outcome, and what was wrong. ``stock``: router on, nothing to serve; results and gradients are stock's bits.
``general``: every call is served by a kernel for any layout; results are of class `stock` by the judge's own rule.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from general_kernels import Call, CallsOfOurs, compute_keys
from tiny_kernels import EVERY_SLOT, seen
from torch.utils._pytree import tree_leaves

import torch_autokern as ak
from torch_autokern.judge.accuracy import Task, evaluate, limits_for
from torch_autokern.judge.families import Family
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.session import EVERY_FAMILY, session
from torch_autokern.store.key import KernelKey

# The ops themselves, and composites that end in them in ways of their own.
INTERCEPTED = (
    "mm", "addmm", "bmm", "baddbmm", "softmax", "log_softmax", "nn.functional.layer_norm", "native_layer_norm",
    "_softmax_backward_data",
)  # fmt: skip
COMPOSITES = (
    "matmul", "__rmatmul__", "addbmm", "nn.functional.linear", "nn.functional.bilinear", "einsum", "linalg.multi_dot",
    "masked.softmax", "masked.log_softmax", "torch.ops.aten._safe_softmax.default", "nn.functional.cross_entropy",
    "nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention",
)  # fmt: skip
COMPOSITE_SAMPLES = 24  # an op and dtype; attention alone has 768, alike to us
Run = Callable[[], list[torch.Tensor | None]]


def samples(names: tuple[str, ...], limit: int | None) -> Iterator[tuple[str, Run, Run | None]]:
    """(label, a run that gives results and gradients, the same through `out=` where the op has it)."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if info.name not in names:
            continue
        for dtype in sorted(info.supported_dtypes("cpu"), key=str):
            gradients = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
            torch.manual_seed(0)
            made = info.sample_inputs("cpu", dtype, requires_grad=gradients)
            most = limit or (COMPOSITE_SAMPLES if info.name in COMPOSITES else None)
            for number, sample in enumerate(itertools.islice(made, most)):
                label = f"{info.name} {info.variant_test_name} {dtype} {number}"
                yield label, _bound(info, sample), _bound_out(info, sample) if info.supports_out else None


def _bound(info: Any, sample: Any) -> Run:
    def run() -> list[torch.Tensor | None]:
        torch.manual_seed(1)  # dropout
        results = _tensors(info.op(sample.input, *sample.args, **sample.kwargs))
        leaves = [
            t
            for t in tree_leaves((sample.input, sample.args, sample.kwargs))
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        wanted = [t for t in results if t.requires_grad]
        if not leaves or not wanted:
            return list(results)
        weights = [torch.linspace(-1, 1, t.numel()).to(t.dtype).view_as(t) for t in wanted]
        return [*results, *torch.autograd.grad(wanted, leaves, weights, allow_unused=True)]

    return run


def _bound_out(info: Any, sample: Any) -> Run:
    def run() -> list[torch.Tensor | None]:
        with torch.no_grad():
            result = info.op(sample.input, *sample.args, **sample.kwargs)
            out = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype).zero_()
            return _tensors(info.op(sample.input, *sample.args, **sample.kwargs, out=out))

    return run


def _tensors(results: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]


def difference(mine: list[torch.Tensor | None], stock: list[torch.Tensor | None]) -> str:
    """The first way in which two lists of results differ in dtype, shape, strides or bits; "" when they do not."""
    for a, b in itertools.zip_longest(mine, stock):
        if a is None or b is None:
            if a is not b:
                return f"{a} instead of {b}"
            continue
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return f"{a.dtype} {tuple(a.shape)} {a.stride()} instead of {b.dtype} {tuple(b.shape)} {b.stride()}"
        raw = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        if not torch.equal(*raw):
            return "other bits"
    return ""


def check_stock(names: tuple[str, ...], limit: int | None) -> dict[str, Any]:
    """Router on, empty table: everything is stock's, bit for bit."""
    extension().set_table([])
    wrong: list[str] = []
    outcomes: dict[str, Counter[str]] = {}
    for label, run, run_out in samples(names, limit):
        for form, call in (("", run), (" out=", run_out)):
            if call is None:
                continue
            stock = call()
            mine: list[torch.Tensor | None] = []
            _add(outcomes, _inside(lambda call=call, mine=mine: mine.extend(call())))  # type: ignore[misc]
            problem = difference(mine, stock)
            wrong += [f"{label}{form}: {problem}"] if problem else []
    return {"outcomes": outcomes, "wrong": wrong}


def check_general(names: tuple[str, ...], limit: int | None) -> dict[str, Any]:
    """Every call is served by the general kernel, through both forms, and is of class `stock`."""
    calls: dict[str, tuple[str, Call]] = {}
    found: dict[str, KernelKey] = {}
    runs = [(label, run) for label, run, _ in samples(names, limit)]
    with ak.record() as recording:  # composites take other paths while a dispatch mode is on, and some call ATen beneath it
        for _, run in runs:
            run()
    found.update((entry.key.digest, entry.key) for entry in recording.workload().entries)
    for label, run in runs:
        with CallsOfOurs() as collected:
            run()
        for call in collected.calls:
            key = SPECS[call[0]].key(call[1], call[2])
            calls.setdefault(key.digest, (label, call))
            found[key.digest] = key
    keys = list(found.values())
    natives = compute_keys(keys)
    place = torch.get_num_threads()
    rows = [(SPECS[k.op].encode(k, place), [(*slot, n) for slot in EVERY_SLOT]) for k, n in zip(keys, natives, strict=True)]
    extension().set_table(rows)
    wrong = []
    outcomes: dict[str, Counter[str]] = {}
    for label, call in calls.values():
        wrong += [f"{label}: {problem}" for problem in _check_call(*call, outcomes)]
    for label, run in runs:
        happened = _inside(run)
        _add(outcomes, happened)
        if any("no_record" in reasons for reasons in happened.values()):
            wrong.append(f"{label}: not all served, {happened}")
    return {"outcomes": outcomes, "wrong": wrong, "keys": len(keys)}


def _check_call(op: str, tensors: list[torch.Tensor | None], scalars: dict[str, Any], outcomes: Any) -> list[str]:
    spec = SPECS[op]
    stock = spec.stock(tensors, scalars)
    problems = []
    for form in ("functional", "out") if len(stock) == 1 else ("functional",):
        mine: list[torch.Tensor] = []
        happened = _inside(lambda form=form, mine=mine: mine.extend(_call(spec, form, tensors, scalars, stock)))  # type: ignore[misc]
        _add(outcomes, happened)
        if happened != {op: {"hit": 1}}:
            problems.append(f"{op} {form}: {happened}")
            continue
        problems += [f"{op} {form}: {text}" for text in _beyond_class(spec, tensors, scalars, mine, stock)]
    return problems


def _call(spec: Any, form: str, tensors: Any, scalars: Any, stock: Any) -> Any:
    if form == "functional":
        return spec.stock(tensors, scalars)
    overload = getattr(torch.ops.aten, spec.name).out
    positional, keyword = spec.call_args(tensors, scalars)
    name = next(argument.name for argument in overload._schema.arguments if argument.is_out)
    out = torch.empty_strided(stock[0].shape, stock[0].stride(), dtype=stock[0].dtype)
    return (overload(*positional, **keyword, **{name: out}),)


def _beyond_class(spec: Any, tensors: Any, scalars: Any, mine: Any, stock: Any) -> Iterator[str]:
    for a, b in zip(mine, stock, strict=True):
        if b is not None and (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            yield f"{a.dtype} {a.shape} {a.stride()} instead of {b.dtype} {b.shape} {b.stride()}"
            return
    if not stock[0].is_floating_point():
        if not torch.equal(mine[0], stock[0]):
            yield "other integers"
        return
    task = Task(spec, spec.key(tensors, scalars), Accuracy())
    scores = evaluate(task, Family.NORMAL, tensors, [mine, stock], stock)
    for index, score in enumerate(scores):
        if stock[index] is None:
            continue
        ours, theirs = score.tallies
        limit = limits_for(task, index, Family.NORMAL, stock[index].numel(), [theirs.pool], score.ulp)
        if ours.nonfinite or ours.nonzero or ours.pool.largest > limit.largest or ours.pool.rms > limit.rms:
            error = f"{ours.pool.largest:.2g} from the truth, limit {limit.largest:.2g}"
            yield f"result {index} is {error}, {ours.nonfinite} {ours.nonzero}"


def _inside(run: Callable[[], object]) -> dict[str, dict[str, int]]:
    def inside() -> None:
        with ak.enabled():
            run()

    return seen(inside)


def _add(outcomes: dict[str, Counter[str]], more: dict[str, dict[str, int]]) -> None:
    for op, reasons in more.items():
        outcomes.setdefault(op, Counter()).update(reasons)


def main(limit: int) -> None:
    """Print both reports. A limit of 0: all samples of the intercepted ops, and the composites too."""
    warnings.simplefilter("ignore")
    session().refresh()
    session()._families = EVERY_FAMILY  # as if the store held kernels of each op family
    names = INTERCEPTED if limit else INTERCEPTED + COMPOSITES
    print(json.dumps({"stock": check_stock(names, limit or None), "general": check_general(names, limit or None)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
