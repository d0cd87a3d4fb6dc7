"""What a search reports: `Progress` while it runs, `WarmReport` at its end."""

from __future__ import annotations

from typing import Literal

import msgspec

from torch_autokern.ops import spec_of
from torch_autokern.search.effect import Effect
from torch_autokern.store.key import KernelKey

KeyStatus = Literal["won", "already_there", "not_won", "not_tried"]
Activity = Literal["waiting", "building", "screening", "judging", "paused", "asking", "key_done", "finished"]


class Progress(msgspec.Struct, frozen=True):
    """Where a search stands. Counts are of this run; `rate_per_minute` counts candidates built or screened to their end;
    `best_ratio` is the best screened or proved ratio of the current key (0: none yet); `seconds_left` is None without a
    budget."""

    activity: Activity
    key: KernelKey | None
    share: float
    keys_done: int
    keys_total: int
    keys_won: int
    built: int
    screened: int
    judged: int
    refused: int
    rate_per_minute: float
    best_ratio: float
    seconds_left: float | None
    message: str = ""


class KeyResult(msgspec.Struct, frozen=True):
    """One key's outcome. `share` is its part of the recorded wall time. Ratios are stock over candidate with the interval of
    the verdict where `status` is won or already_there; else `ratio` is the best that was timed (0: none) and `reason` says why
    not."""

    key: KernelKey
    share: float
    status: KeyStatus
    ratio: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    record_id: str = ""
    reason: str = ""
    tried: int = 0

    def __str__(self) -> str:
        name = describe_key(self.key)
        if self.status in ("won", "already_there"):
            words = "won" if self.status == "won" else "already in the store"
            note = f" ({self.reason})" if self.reason else ""
            return f"{name}: {words}, {self.ratio:.2f}x ({self.ratio_low:.2f} to {self.ratio_high:.2f}){note}"
        return f"{name}: {'not won' if self.status == 'not_won' else 'not tried'}, {self.reason}"


class WarmReport(msgspec.Struct, frozen=True):
    """How a search ended, key by key, in the order they were worked on. Running the same search again continues."""

    keys: tuple[KeyResult, ...]
    seconds: float
    candidates: int
    interrupted: bool = False
    budget_over: bool = False

    def count(self, status: KeyStatus) -> int:
        """How many keys ended so."""
        return sum(result.status == status for result in self.keys)

    def __str__(self) -> str:
        words = [f"{self.count('won')} keys won"]
        for status, name in (("already_there", "already in the store"), ("not_won", "not won"), ("not_tried", "not tried")):
            if self.count(status):  # type: ignore[arg-type]
                words.append(f"{self.count(status)} {name}")  # type: ignore[arg-type]
        return f"{', '.join(words)}; {self.candidates} candidates in {self.seconds:.0f} s"


class SearchReport(msgspec.Struct, frozen=True):
    """How a run stands: its keys, why it ended, what it has spent (`budget.Spent`), its folder, and what people said with what
    it brought."""

    search: WarmReport
    stop: str
    message: str
    spent: dict[str, float]
    run: str
    said: tuple[Effect, ...] = ()

    def __str__(self) -> str:
        spent = self.spent
        tokens = f", {spent['tokens_in'] + spent['tokens_out']:.0f} tokens" if spent["tokens_in"] else ""
        money = f", {spent['money']:.4f} of money" if spent["money"] else ""
        words = f"{spent['candidates']:.0f} candidates in {spent['seconds']:.0f} s{tokens}{money}"
        return f"{self.search.count('won')} of {len(self.search.keys)} keys won; {words}; ended: {self.stop} ({self.message})"


class WarmInterrupted(KeyboardInterrupt):
    """Ctrl-C: everything finished so far is stored, `report` says what; running the same search again continues."""

    def __init__(self, report: WarmReport) -> None:
        super().__init__(f"interrupted: {report}")
        self.report = report


def describe_key(key: KernelKey) -> str:
    """A key in a few words, such as ``_softmax float32 (32, 12, 38, 38) dim=3``."""
    first = next((tensor for tensor in key.tensors if tensor is not None), None)
    layout = "" if first is None else f" {first.dtype} {'x'.join(map(str, first.sizes)) or 'scalar'}"
    scalars = [f"{name}={value}" for name, value in sorted(key.scalars.items()) if name in ("dim", "normalized_shape")]
    return " ".join([key.op + layout, *scalars])


def profile(key: KernelKey, time_us: float) -> str:
    """What a time of a key means: the bytes that must move, and the operations that must be done, a second."""
    spec = spec_of(key)
    moved, flops, seconds = spec.bytes_moved(key), spec.flops(key), max(time_us, 1e-9) * 1e-6
    words = f"{moved} bytes at {moved / seconds / 1e9:.2f} GB/s"
    return f"{words}, {flops:.3g} operations at {flops / seconds / 1e9:.2f} Gop/s" if flops else words
