"""When a key's search is stuck, what a person must know then, and the one question that would help most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from torch_autokern.judge.outcome import ACCEPT_RATIO, Reason, Refusal
from torch_autokern.search.manifest import Ceiling
from torch_autokern.search.nodes import Idea, RoundEnd, Stuck
from torch_autokern.search.outcome import profile
from torch_autokern.search.tried import Tried, parents
from torch_autokern.store.key import KernelKey

Why = Literal["no_gain", "same_failure", "nothing_new"]
# So many candidates in a row that fail alike are no accident of one idea or one kernel.
SAME_FAILURES = 3
# From this share of the measured limit on, more rounds buy little: the question is whether to stop.
NEAR_LIMIT = 0.9
# Right, and only slow, or the machine's doing: no failure that one cure could turn round.
_NOT_ALIKE = frozenset({Reason.NOT_FASTER, Reason.TIMING_UNSTABLE})
_MOST_LISTED = 20
_FIRST_CHARS = 300


def why_stuck(ends: Sequence[RoundEnd], tried: Sequence[Tried], patience: int, since: int) -> Why | None:
    """Whether a key is stuck after its last round.

    Args:
        ends: the key's rounds, in order.
        tried: its candidates, in order.
        patience: rounds without a gain of `ACCEPT_RATIO`, the least that the judge calls one.
        since: the round after which it was called stuck last; what was before does not count again.
    """
    recent = [one for one in tried if _round_of(one) > since][-SAME_FAILURES:]
    refusals = [one.refusal for one in recent]
    reasons = {refusal.reason for refusal in refusals if refusal is not None}
    if len(recent) == SAME_FAILURES and None not in refusals and len(reasons) == 1 and not reasons & _NOT_ALIKE:
        return "same_failure"
    if len(ends) < patience or ends[-1].round - since < patience:
        return None
    before = ends[-patience - 1].best_ratio if len(ends) > patience else 0.0
    return "no_gain" if ends[-1].best_ratio <= before * ACCEPT_RATIO else None


def describe(
    name: str, at: float, why: Why, patience: int, tried: Sequence[Tried], ideas: Sequence[Idea], ceiling: Ceiling | None,
    key: KernelKey,
) -> Stuck:  # fmt: skip
    """The report on a stuck key."""
    place, number = (int(part[1:]) for part in name.split(".")[:2])
    head = {
        "no_gain": f"no gain in {patience} rounds", "nothing_new": "nobody had anything new",
        "same_failure": f"the last {SAME_FAILURES} candidates failed the same way",
    }[why]  # fmt: skip
    question = _question(why, tried, ceiling)
    parts = {
        "What was tried": _ideas(ideas, tried), "What failed, and how": _failures(tried),
        "Times, profile, and the distance to the limit": _times(tried, ceiling, key), "Question": question,
    }  # fmt: skip
    report = f"# Key {place} is stuck after round {number}: {head}\n" + "".join(
        f"\n## {title}\n\n{text}\n" for title, text in parts.items()
    )
    return Stuck(f"{name}.stuck", at, place, number, why, report, question)


def _question(why: Why, tried: Sequence[Tried], ceiling: Ceiling | None) -> str:
    """One question that a person can answer in a sentence."""
    best = _best(tried)
    if why == "same_failure":
        refusal = next(one.refusal for one in reversed(tried) if one.refusal is not None)
        return (
            f"The last {SAME_FAILURES} candidates were all refused as {refusal.reason.value} ({_example(refusal)}); "
            "what must a kernel for this key do otherwise?"
        )
    if why == "nothing_new":
        so_far = "nothing is faster than stock" if best is None else f"the best is at {best.ratio:.2f}x"
        return f"Nobody has anything new to try, and {so_far}; which approach is missing?"
    if best is None:
        return (
            "Nothing was right and faster than stock so far; which approach should be tried, or should this key be left alone?"
        )
    if ceiling is None or not ceiling.limit_us or not best.time_us:
        return f"{best.node.id} is at {best.ratio:.2f}x and nothing since was faster; what would you change in it?"
    share = ceiling.limit_us / best.time_us
    if share >= NEAR_LIMIT:
        return f"{best.node.id} is at {share:.0%} of the measured limit; is that good enough to stop (goal limit={share:.2f})?"
    rest = best.time_us - ceiling.limit_us
    return (
        f"{best.node.id} takes {best.time_us:.1f} us where {ceiling.limit_us:.1f} us is the limit; "
        f"where do the other {rest:.1f} us go, and how would you save them?"
    )


def _ideas(ideas: Sequence[Idea], tried: Sequence[Tried]) -> str:
    lines = []
    for idea in list(ideas)[-_MOST_LISTED:]:
        mine = [one for one in tried if one.node.idea == idea.id]
        lines.append(f"- {idea.text} (by {idea.author}): {_ended(mine)}")
    return "\n".join(lines) or "Nothing."


def _ended(mine: Sequence[Tried]) -> str:
    best = max((one.ratio for one in mine), default=0.0)
    refused = Counter(one.refusal.reason.value for one in mine if one.refusal is not None)
    words = [f"{len(mine)} kernels"] + ([f"best {best:.2f}x"] if best else [])
    return ", ".join(words + [f"{count} {reason}" for reason, count in refused.most_common()])


def _failures(tried: Sequence[Tried]) -> str:
    refusals = [one.refusal for one in tried if one.refusal is not None]
    counts = Counter(refusal.reason for refusal in refusals)
    lines = []
    for reason, count in counts.most_common():
        last = next(refusal for refusal in reversed(refusals) if refusal.reason is reason)
        lines.append(f"- {reason.value}, {count} of {len(tried)} candidates; the last: {_example(last)}")
    return "\n".join(lines) or "Nothing failed."


def _example(refusal: Refusal) -> str:
    first = next((line.strip() for line in refusal.message.splitlines() if line.strip()), "no words")
    where = f"; inputs {refusal.family}, seed {refusal.seed}" if refusal.family else ""
    return first[:_FIRST_CHARS] + where


def _times(tried: Sequence[Tried], ceiling: Ceiling | None, key: KernelKey) -> str:
    lines = []
    if ceiling is not None:
        lines.append(f"- stock: {ceiling.stock_us:.1f} us, {profile(key, ceiling.stock_us)}")
        lines += [f"- the limit: {ceiling.limit_us:.1f} us"] if ceiling.limit_us else []
        lines += [f"- copying the key's bytes: {ceiling.copy_us:.1f} us"] if ceiling.copy_us else []
        lines += [f"- a large product runs at {ceiling.flops_per_s / 1e9:.1f} GFLOP/s"] if ceiling.flops_per_s else []
    for one in parents(tried, best=3, diverse=0)[0]:
        share = f", {ceiling.limit_us / one.time_us:.0%} of the limit" if ceiling and ceiling.limit_us and one.time_us else ""
        proved = "proved" if one.is_proved else "screened"
        lines.append(f"- {one.node.id}: {one.time_us:.1f} us, {one.ratio:.2f}x ({proved}){share}, {profile(key, one.time_us)}")
    return "\n".join(lines) or "Nothing was timed."


def _best(tried: Sequence[Tried]) -> Tried | None:
    return max((one for one in tried if one.is_proved), key=lambda one: (one.ratio, one.node.id), default=None)


def _round_of(one: Tried) -> int:
    return int(one.node.id.split(".")[1][1:])
