"""What a run may spend, and what it has spent: time, tokens, money, candidates. Nothing is begun that could exceed a budget."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from torch_autokern.search.manifest import Limits, Price
from torch_autokern.search.nodes import Offered, Reply, StopReason
from torch_autokern.search.run import Run

LEAST_REPLY_TOKENS = 256  # less holds neither an idea nor a kernel
_FIXED_PART = 0.4  # of a step that does not depend on the key: starting processes, building sanitized programs
MESSAGE_TOKENS = 32  # room for what a server puts around each message


class BudgetOver(Exception):
    """A budget does not allow the next step."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason: StopReason = reason
        self.message = message


class Spent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run has used up."""

    seconds: float
    tokens_in: int
    tokens_out: int
    money: float
    candidates: int


class Reservation(msgspec.Struct, frozen=True):
    """The most that one request can use. `reply_tokens` is what the server is told as its limit."""

    tokens_in: int
    reply_tokens: int
    money: float


class Clock:
    """A run's time and its budget (seconds, or None for no end); `before` was used up in earlier lives. It remembers how long
    steps of each kind took for keys of which `size` (stock's time of a call), so that none is begun that would probably not end
    in time."""

    def __init__(self, budget_seconds: float | None, before: float = 0.0) -> None:
        self._started = time.monotonic() - before
        self.budget_seconds = budget_seconds
        self._longest: dict[str, dict[float, float]] = {}  # step, size, seconds

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def left(self) -> float | None:
        """Seconds left, never negative; None without a budget."""
        return None if self.budget_seconds is None else max(0.0, self.budget_seconds - self.elapsed())

    def stand_still(self, seconds: float) -> None:
        """Seconds that passed in waiting for a person: they are nobody's."""
        self._started += seconds

    def is_over(self, step: str = "", size: float = 0.0) -> bool:
        """Whether the budget is used up, or will be before such a step has ended."""
        left = self.left()
        return left is not None and left <= self._expected(step, size)

    @contextmanager
    def timed(self, step: str, size: float = 0.0) -> Iterator[None]:
        """Remember how long a step takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            seen = self._longest.setdefault(step, {})
            seen[size] = max(seen.get(size, 0.0), time.monotonic() - began)

    def _expected(self, step: str, size: float) -> float:
        """The longest such step for a key that is not larger; for one smaller than all so far a part of the smallest one's."""
        seen = self._longest.get(step)
        if not seen:
            return 0.0
        smallest = min(seen)
        if size < smallest:
            return seen[smallest] * (_FIXED_PART + (1 - _FIXED_PART) * size / smallest)
        return max(seconds for of_size, seconds in seen.items() if of_size <= size)


def allot(clock: Clock, times_us: Sequence[float]) -> float:
    """Seconds from now that the first of the keys with these stock times may take: by the square root of their times, so that
    one long key does not starve the others. Infinite without a budget."""
    left = clock.left()
    if left is None:
        return math.inf
    weights = [math.sqrt(max(time_us, 1.0)) for time_us in times_us]
    return left * weights[0] / sum(weights)


class Meter:
    """Tokens, money and candidates of a run, those of earlier lives included. Requests that run side by side each hold what
    they could use at most, so together they cannot exceed a budget either."""

    def __init__(self, run: Run, limits: Limits, prices: dict[str, Price]) -> None:
        self._run = run
        self.limits = limits
        self._prices = prices
        self._guard = threading.Lock()
        self._held: list[Reservation] = []

    def spent(self) -> Spent:
        """All that the journal says was used."""
        replies = self._run.every(Reply)
        return Spent(
            round(self._run.elapsed(), 3),
            sum(reply.tokens_in for reply in replies),
            sum(reply.tokens_out for reply in replies),
            sum(reply.money for reply in replies),
            sum(node.dropped is None for node in self._run.every(Offered)),
        )

    def candidates_left(self) -> int | None:
        """How many more candidates may be built; None without a bound."""
        most = self.limits.candidates
        return None if most is None else max(0, most - self.spent().candidates)

    def reserve(self, model: str, prompt_bytes: int, messages: int, wanted: int) -> Reservation:
        """Hold what a request can use at most: no tokeniser makes more tokens than there are bytes.

        Raises:
            BudgetOver: what is left holds no sensible reply.
        """
        tokens_in = prompt_bytes + MESSAGE_TOKENS * (messages + 1)
        price = self._prices.get(model, Price(0.0, 0.0))
        with self._guard:
            spent = self.spent()
            reply = wanted
            if self.limits.tokens is not None:
                held = sum(other.tokens_in + other.reply_tokens for other in self._held)
                left = self.limits.tokens - spent.tokens_in - spent.tokens_out - held
                reply = min(reply, left - tokens_in)
                if reply < LEAST_REPLY_TOKENS:
                    raise BudgetOver("tokens", f"{left} tokens left, the next request may take {tokens_in} before its answer")
            if self.limits.money is not None:
                left_money = self.limits.money - spent.money - sum(other.money for other in self._held)
                room = left_money * 1e6 - tokens_in * price.input_per_million
                if price.output_per_million > 0:
                    reply = min(reply, int(room / price.output_per_million))
                if room < 0 or reply < LEAST_REPLY_TOKENS:
                    raise BudgetOver("money", f"{left_money:.4f} left, too little for the next request")
            held_now = Reservation(tokens_in, reply, self.cost(model, tokens_in, reply))
            self._held.append(held_now)
            return held_now

    def release(self, reservation: Reservation) -> None:
        """The request is over, and what it used is in the journal."""
        with self._guard:
            self._held = [other for other in self._held if other is not reservation]

    def cost(self, model: str, tokens_in: int, tokens_out: int) -> float:
        """Money for so many tokens; 0 without a price."""
        price = self._prices.get(model)
        return 0.0 if price is None else (tokens_in * price.input_per_million + tokens_out * price.output_per_million) / 1e6
