"""What people write: `optimize`, `restore`, `enabled`, `enable`, `disable`, `record`, `warm`, `explain`, `stats` and others."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, overload

import msgspec
import torch
from torch import nn

from torch_autokern import config
from torch_autokern.errors import InvalidInputError, StrictModeError
from torch_autokern.ops import spec_for_words
from torch_autokern.runtime.extension import extension, extension_state
from torch_autokern.runtime.session import Session, accuracy_code, session
from torch_autokern.runtime.target import local_target
from torch_autokern.store.record import AccuracyClass
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry, load_workload

if TYPE_CHECKING:
    from torch_autokern.report.explanation import Explanation
    from torch_autokern.report.statistics import Stats
    from torch_autokern.runtime.ranks import RanksReport
    from torch_autokern.search.loop import WarmReport
    from torch_autokern.store.pack import Pack
    from torch_autokern.store.pack_refusal import PackRefusal

ModelT = TypeVar("ModelT", bound=nn.Module)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_STRICT_PREFIX = "autokern strict mode:"
_SLOT = "_compiled_call_impl"  # nn.Module calls it instead of `_call_impl`, and drops it on deepcopy and pickle


class AutokernWarning(UserWarning):
    """Said once: nothing is replaced here, and why."""


class ScopedCall:
    """Runs a callable inside a scope: op calls in it, and in the backward of what it computed, are served.

    An instance sits in an optimised model's `_compiled_call_impl` slot.
    """

    def __init__(self, inner: Callable[..., Any], accuracy: str, strict: bool | None, owner: nn.Module | None = None) -> None:
        self.inner = inner
        self.accuracy = _checked(accuracy)
        self.strict = config.strict() if strict is None else strict
        self.native_scope = _new_scope(self.accuracy, self.strict)
        self._run = self.native_scope.run
        self.owner = owner

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the model is stock: where a class copies its `__dict__` whole, the slot's copy is None."""
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        inner = self.inner
        caller = sys._getframe(1).f_locals.get("self")  # the module whose slot this is, as `nn.Module.__call__` knows it
        if caller is not self.owner and isinstance(caller, nn.Module) and caller.__dict__.get(_SLOT) is self:
            # Its `__dict__` was copied whole, so it must run itself, not the original.
            inner = caller._call_impl
            if not getattr(caller, "_is_replica", False):  # DataParallel's replica is the same model, a copy is stock
                return inner(*args, **kwargs)
        try:
            return self._run(inner, args, kwargs)
        except RuntimeError as error:
            if str(error).startswith(_STRICT_PREFIX):
                raise StrictModeError(str(error).splitlines()[0]) from None
            raise


_warned: set[str] = set()
_warned_lock = threading.Lock()


def _warn_once(message: str) -> None:
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    level = 1
    while sys._getframe(level).f_code.co_filename in (__file__, contextlib.__file__):
        level += 1  # the warning names the person's line, not ours
    warnings.warn(message, AutokernWarning, stacklevel=level + 1)


def _checked(accuracy: str) -> AccuracyClass:
    if accuracy not in get_args(AccuracyClass):
        raise InvalidInputError(f"accuracy={accuracy!r}; expected one of {', '.join(get_args(AccuracyClass))}")
    return accuracy  # type: ignore[return-value]


def _usable_session() -> Session | None:
    """The session when kernels can be served here; else None, after one warning that says why."""
    current = session()
    if current.unavailable:
        _warn_once(f"torch_autokern serves nothing: {current.unavailable}")
        return None
    return current


def _new_scope(accuracy: AccuracyClass, strict: bool) -> Any:
    scope = extension().Scope()
    scope.set(accuracy_code(accuracy), strict)
    return scope


@overload
def optimize(target: ModelT, *, accuracy: str = "stock", strict: bool | None = None) -> ModelT: ...
@overload
def optimize(target: FunctionT, *, accuracy: str = "stock", strict: bool | None = None) -> FunctionT: ...


def optimize(target: Any, *, accuracy: str = "stock", strict: bool | None = None) -> Any:
    """Serve verified kernels in a model's forward and in the backward of what it computed; everything else stays stock.

    Args:
        target: an `nn.Module`, changed in place and returned (class, parameters, hooks, `state_dict` and saved bytes stay as
            they are; `deepcopy` and `pickle` give a stock model), or a function, for which a wrapper is returned.
        accuracy: the weakest class admitted. "exact": bitwise equal to stock; "stock": error against float64 no worse than
            stock's; "tolerance": also records proved to a stated atol and rtol only.
        strict: raise where a call is not served. None: as AUTOKERN_STRICT says.

    Calling it again replaces the earlier choice. `restore` undoes it. Not served: `model.forward(...)` called directly, and
    a compiled function that calls the model from outside; use `enable` for those.

    Raises:
        InvalidInputError: an unknown accuracy class, or a target that is neither module nor callable.
    """
    _checked(accuracy)
    if isinstance(target, nn.Module):
        return _optimize_module(target, accuracy, strict)
    if not callable(target):
        raise InvalidInputError(f"optimize() takes a module or a function, got {type(target).__name__}")
    current = _usable_session()
    if current is None:
        return target
    scoped = ScopedCall(target, accuracy, strict)
    current.add_user(scoped, strict=scoped.strict)

    @functools.wraps(target)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return scoped(*args, **kwargs)

    wrapper.autokern_scope = scoped  # type: ignore[attr-defined]
    return wrapper


def _optimize_module(model: nn.Module, accuracy: str, strict: bool | None) -> nn.Module:
    current = _usable_session()
    if current is None:
        return model
    restore(model)
    inner = getattr(model, _SLOT) or model._call_impl
    scoped = ScopedCall(inner, accuracy, strict, model)
    current.add_user(scoped, strict=scoped.strict)
    setattr(model, _SLOT, scoped)
    if not current.loaded:
        where = current.store.write_root or "memory"
        _warn_once(
            f"no verified kernel for this machine in {where}: every call runs stock until one is found "
            "(autokern record -- python your_script.py, then autokern warm)"
        )
    return model


@overload
def kernel(target: ModelT, *, recompute: bool = False) -> ModelT: ...
@overload
def kernel(target: FunctionT, *, recompute: bool = False) -> FunctionT: ...
@overload
def kernel(*, recompute: bool = False) -> Callable[[FunctionT], FunctionT]: ...


def kernel(target: Any = None, *, recompute: bool = False) -> Any:
    """Make a whole function, or a module's `forward`, one op that a kernel may be found and served for.

    Decorating serves nothing by itself: calls are served where `optimize`, `enabled` or `enable` say so, by the same records,
    misses and counters as built-in ops, under the name ``function:<qualified name>:<hash of what it computes>``. On a miss, and
    everywhere else, the body runs as it is. `torch.compile` sees one opaque operator where a kernel is loaded, else the body.

    Args:
        target: a function of tensors (1 to 16, those of its module included), numbers and words that returns a tensor or a
            tuple of tensors; a module, whose `forward` is replaced (copies and saved modules carry that along); or a class of
            modules. Without it, a decorator.
        recompute: also serve calls of which a gradient is wanted; their backward computes the body again from its arguments,
            and is a function of its own that kernels are searched and served for. Off, such calls run the body, because a
            forward that is computed twice is seldom faster.

    A body that draws random numbers, looks at values of tensors, writes to its arguments, uses tensors that are no arguments or
    returns a view of one cannot be one op: it runs as it is, and each such call counts as a miss with the reason `body`.

    Raises:
        InvalidInputError: a target that is neither a function, a module nor a module's class.
    """
    from torch_autokern.runtime.decorated import decorate

    if target is None:
        return functools.partial(decorate, recompute=recompute)
    return decorate(target, recompute=recompute)


def restore(model: nn.Module) -> nn.Module:
    """Take `optimize` back: the model's calls, and backward passes still to come, are stock. Harmless when not optimised."""
    scoped = model.__dict__.get(_SLOT)
    if isinstance(scoped, ScopedCall) and scoped.owner is not model:
        delattr(model, _SLOT)  # came along when the original's `__dict__` was copied whole
    elif isinstance(scoped, ScopedCall):
        scoped.native_scope.end()
        if scoped.inner == model._call_impl:
            delattr(model, _SLOT)
        else:
            setattr(model, _SLOT, scoped.inner)  # what model.compile() had put there
        session().remove_user(scoped)
    return model


def is_optimized(model: nn.Module) -> bool:
    """Whether calls of this very module are served (a copy of an optimised model is not)."""
    return _accuracy_of(model) is not None


def _accuracy_of(target: object) -> AccuracyClass | None:
    """The policy that calls of an optimised model or function run under; None for anything else."""
    if not isinstance(target, nn.Module):
        scoped = getattr(target, "autokern_scope", None)
        return scoped.accuracy if isinstance(scoped, ScopedCall) else None
    scoped = target.__dict__.get(_SLOT)
    return scoped.accuracy if isinstance(scoped, ScopedCall) and scoped.owner is target else None


@contextmanager
def enabled(*, accuracy: str = "stock", strict: bool | None = None) -> Iterator[None]:
    """Serve op calls of this thread inside the block, and the backward of what it computed."""
    admitted = _checked(accuracy)
    current = _usable_session()
    if current is None:
        yield
        return
    every_call = config.strict() if strict is None else strict
    scope = _new_scope(admitted, every_call)
    current.open_block(every_family=every_call)
    token = scope.enter()
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith(_STRICT_PREFIX):
            raise StrictModeError(str(error).splitlines()[0]) from None
        raise
    finally:
        if scope.leave(token):
            current.add_user(_ended_blocks)  # the backward of what the block computed may come at any time
        current.close_block(every_family=every_call)


class _User:
    """Stands for something without an object of its own among the session's users."""


_process = _User()
_ended_blocks = _User()


def enable(*, accuracy: str = "stock", strict: bool | None = None) -> None:
    """Serve op calls of the whole process, every thread, from now on. Calling it again changes the policy."""
    code = accuracy_code(_checked(accuracy))
    current = _usable_session()
    if current is not None:
        every_call = config.strict() if strict is None else strict
        current.add_user(_process, strict=every_call)
        extension().set_process_policy(True, code, every_call)


def disable() -> None:
    """Take `enable` back; harmless when not enabled. Optimised models stay optimised; without one the router is taken back, and
    with it the backward of `enabled` blocks that have ended."""
    if extension_state().module is not None:
        extension().set_process_policy(False, 0, False)
        session().remove_user(_process)
        session().remove_user(_ended_blocks)


class Recording:
    """What `record()` yields. `workload()` may be asked inside the block and after it."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._rows: list[Any] | None = None

    def _stop(self) -> None:
        global _latest_recording
        self._ended = time.perf_counter()
        self._rows = extension().recorded_keys()
        _latest_recording = self

    def workload(self) -> Workload:
        """Keys by falling time, with calls and stock's time in each."""
        rows = extension().recorded_keys() if self._rows is None else self._rows
        wall = (self._ended or time.perf_counter()) - self._started
        entries = []
        for words, output_words, calls, out_calls, seconds in rows:
            spec = spec_for_words(words)
            key = spec.decode(words, output_words)
            if out_calls == calls:  # only `out` forms were seen, with whatever strides their callers chose
                key = msgspec.structs.replace(key, outputs=spec.stock_outputs(key))
            entries.append(WorkloadEntry(key, calls, seconds * 1e6, out_calls))
        entries.sort(key=lambda entry: (-entry.stock_time_us, entry.key.digest))
        target = local_target()
        return Workload(SCHEMA, str(torch.__version__), target.name, target.threads, wall * 1e6, tuple(entries))


_latest_recording: Recording | None = None
_recording_lock = threading.Lock()


@contextmanager
def record() -> Iterator[Recording]:
    """Note which keys the process asks for inside the block (all threads), and how long each call takes.

    Raises:
        InvalidInputError: another recording is on.
        ExtensionError: there is no usable extension, so no call can be seen.
    """
    native = extension()
    if not _recording_lock.acquire(blocking=False):
        raise InvalidInputError("a recording is on already in this process; end it before starting another")
    current = session()
    current.open_block(every_family=True)  # also under the kill switch, which stops serving, not recording
    try:
        native.recorder_clear()
        native.set_recording(True)
        recording = Recording()
        try:
            yield recording
        finally:
            native.set_recording(False)
            recording._stop()
    finally:
        current.close_block(every_family=True)
        _recording_lock.release()


def warm(
    workload: Workload | str | Path, *, budget: float | None = None, accuracy: str = "stock", **options: Any
) -> WarmReport:
    """Search kernels for a recorded workload and store what is proved; running it again continues.

    Args:
        workload: a `Workload`, or the path of one.
        budget: minutes; None: until every key was tried.
        accuracy: the class to prove.
        options: see `torch_autokern.search.loop.warm`.
    """
    from torch_autokern.search.loop import warm as search

    loaded = workload if isinstance(workload, Workload) else load_workload(Path(workload))
    current = session()
    report = search(
        loaded,
        budget_seconds=None if budget is None else budget * 60,
        store=current.store,
        accuracy=_checked(accuracy),
        **options,
    )
    current.refresh()
    return report


def explain(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call `target(*args, **kwargs)` once and say, for every op call of ours in it, which kernel serves it, or else the first
    failed condition of each candidate record; and what ran that is not ours, with its share of the time."""
    from torch_autokern.report.explanation import explain_call

    return explain_call(target, args, kwargs, record=record, accuracy=_accuracy_of(target))


def stats() -> Stats:
    """Calls, hits, misses by reason with the cheapest cure, and time saved net of our own cost, since the process started.
    Shares of time are those of the latest `record()` or `explain()`: calls themselves are not timed."""
    from torch_autokern.report.statistics import collect

    return collect(session(), _latest_recording.workload() if _latest_recording else None)


def empty_cache() -> None:
    """Give back the pages that the output pool keeps."""
    if extension_state().module is not None:
        extension().pool_empty()


def refresh() -> int:
    """Read the store again and swap the table; returns the number of keys it serves. Calls go on meanwhile."""
    return session().refresh()


def install_pack(path: str | Path) -> Pack | PackRefusal:
    """Install a pack for this user, after every check that needs no device, and serve what of it is armed here.

    Args:
        path: an ``.akpack`` file, or a pack's folder.

    Returns:
        The pack, or the reason why it is not installed with the command that resolves it. Nothing is downloaded.

    Raises:
        StoreError: the folder for packs cannot be written.
    """
    from torch_autokern.runtime.pack_facts import read_binaries
    from torch_autokern.store.pack_file import read_pack
    from torch_autokern.store.pack_install import install_pack as install
    from torch_autokern.store.pack_install import require_state
    from torch_autokern.store.pack_refusal import PackRefusal

    envelope = read_pack(Path(path))
    outcome = envelope if isinstance(envelope, PackRefusal) else install(envelope, require_state(), read_binaries)
    if not isinstance(outcome, PackRefusal):
        session().refresh()
    return outcome


def check_ranks(group: Any | None = None) -> RanksReport:
    """Whether every rank of a `torch.distributed` process group serves the same kernels; a collective call, so all ranks make
    it.

    Args:
        group: a process group; None: all ranks. Without an initialised process group there is one rank.

    Returns:
        A report that is true where all agree, and else names, rank by rank, the first difference from rank 0.
    """
    from torch_autokern.runtime.ranks import compare_ranks

    return compare_ranks(session(), group)
