"""What the judge says: a closed set of reasons, a refusal that lets an author fix the kernel, and the screen's result."""

from __future__ import annotations

from enum import Enum

import msgspec

from torch_autokern.errors import InvalidInputError
from torch_autokern.store.record import AccuracyClass, FamilyError

JUDGE_VERSION = 3
ACCEPT_RATIO = 1.02


class Reason(str, Enum):
    """Why a candidate was refused. Closed: a report can count them."""

    BUILD_FAILED = "build_failed"
    BAD_PLAN = "bad_plan"
    STATIC_RULE = "static_rule"
    BOX_REFUSED = "box_refused"
    NO_DEVICE = "no_device"
    UNSUPPORTED_KEY = "unsupported_key"
    CRASHED = "crashed"
    HUNG = "hung"
    WRONG_VALUE = "wrong_value"
    WRONG_NONFINITE = "wrong_nonfinite"
    WRONG_LAYOUT = "wrong_layout"
    NOT_WRITTEN = "not_written"
    WROTE_OUTSIDE = "wrote_outside"
    WROTE_INPUT = "wrote_input"
    PROPERTY_BROKEN = "property_broken"
    SANITIZER = "sanitizer"
    NOT_DETERMINISTIC = "not_deterministic"
    STALE_RESULT = "stale_result"
    CHANGED_THREAD = "changed_thread"
    NOT_FASTER = "not_faster"
    FASTER_THAN_PHYSICS = "faster_than_physics"
    TIMING_UNSTABLE = "timing_unstable"
    VACUOUS_TASK = "vacuous_task"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One element of a result, what was got there and what was expected (as text: NaN and infinities survive)."""

    index: tuple[int, ...]
    got: str
    expected: str


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A candidate was not accepted. `message` says what was seen, where, and what was expected.

    `family` and `seed` replay the inputs ("" and None where the reason has none). `output` is the index of the result and
    `first_wrong` the position of its worst element. `error`, `stock_error` and `limit` are in units of the natural scale
    (absolute for class `tolerance`). `best_ratio` is stock's time over the candidate's where it was timed. `beyond` counts
    the elements of the worst trial over the limit of a single one, and `first` shows the first of them. `cases` are the trials
    that led here, each as "FAMILY:SEED:TRIAL" (`judge/replay.py`).
    """

    reason: Reason
    message: str
    family: str = ""
    seed: int | None = None
    output: int = 0
    first_wrong: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    error: float | None = None
    stock_error: float | None = None
    limit: float | None = None
    best_ratio: float | None = None
    beyond: int = 0
    first: tuple[Place, ...] = ()
    cases: tuple[str, ...] = ()


class ScreenResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A candidate passed the screen: right on three families, with a first, short timing.

    `ratio` is stock over candidate with its 99 % interval in one process; `seconds` is what the screen took.
    """

    ratio: float
    ratio_low: float
    ratio_high: float
    stock_us: float
    candidate_us: float
    families: tuple[FamilyError, ...]
    seconds: float


class Accuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The class to prove. `atol` and `rtol` count only for "tolerance": ``|got - truth| <= atol + rtol * |truth|``."""

    kind: AccuracyClass = "stock"
    atol: float = 0.0
    rtol: float = 0.0


def as_accuracy(value: Accuracy | str) -> Accuracy:
    """Accept "exact" and "stock" by name.

    Raises:
        InvalidInputError: an unknown name, "tolerance" without bounds, or a bound that is negative or not finite.
    """
    if value == "exact":
        return Accuracy("exact")
    if value == "stock":
        return Accuracy("stock")
    if not isinstance(value, Accuracy):
        raise InvalidInputError(f"accuracy {value!r} is unknown; use 'exact', 'stock' or Accuracy('tolerance', atol, rtol)")
    if value.kind == "tolerance":
        good = 0 <= value.atol < float("inf") and 0 <= value.rtol < float("inf") and value.atol + value.rtol > 0
        if not good:
            raise InvalidInputError(f"tolerance needs finite bounds, one above 0; got atol={value.atol}, rtol={value.rtol}")
    return value


class RefusedError(Exception):
    """Inside the runner: the candidate broke a rule, nothing more is worth running."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
