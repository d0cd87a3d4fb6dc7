"""`autokern judge`: a kernel of one's own before the judge. Accepted, or refused with what its author needs to mend it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from torch_autokern.cli import shell
from torch_autokern.cli.accuracy import chosen
from torch_autokern.errors import BuildError, StaticRuleError

if TYPE_CHECKING:
    from torch_autokern.build.candidate import Artifact
    from torch_autokern.judge.outcome import Accuracy, Refusal
    from torch_autokern.judge.replay import Replayed
    from torch_autokern.judge.submission import Submission
    from torch_autokern.store.key import Target
    from torch_autokern.store.record import FamilyError, Verdict

EXIT_REFUSED = 1
_ARCH_WITHOUT_DEVICE = "sm_90a"
# Not the candidate's fault: another machine, key or moment may judge it.
_NOT_JUDGED = ("box_refused", "no_device", "unsupported_key", "vacuous_task", "timing_unstable")


def judge(
    candidate: Annotated[Path, typer.Argument(help="Folder with kernel.cpp (or .cu, .py: Triton), plan.json and key.json.")],
    op: Annotated[str | None, typer.Option(help="The op, where the key does not name it.")] = None,
    key: Annotated[Path | None, typer.Option(help="The key, where the folder has none.")] = None,
    accuracy: Annotated[str, typer.Option("--class", help="The class to prove: stock, exact or tolerance.")] = "stock",
    atol: Annotated[float, typer.Option(help="Absolute bound for --class tolerance.")] = 0.0,
    rtol: Annotated[float, typer.Option(help="Relative bound for --class tolerance.")] = 0.0,
    replay: Annotated[
        list[str] | None,
        typer.Option(metavar="FAMILY:SEED:TRIAL", help="Only this case, as a refusal printed it. Repeat for more."),
    ] = None,
    timing: Annotated[bool, typer.Option("--timing/--no-timing", help="Without timing: is it right, not is it faster.")] = True,
    allow_weak_box: Annotated[
        bool, typer.Option("--allow-weak-box", help="Run an untrusted kernel although this system cannot box it well.")
    ] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Judge a kernel: right on every input family, clean in memory and state, and faster than stock.

    Exit code 0: accepted. 1: refused, with the reason and the command that replays the case. 2: could not be judged.
    """
    from torch_autokern.judge.outcome import Refusal
    from torch_autokern.judge.submission import read_submission

    proved = chosen(accuracy, atol, rtol, "--class")
    submission = read_submission(candidate, op, key)
    found = _judged(submission, proved, replay or [], timing, allow_weak_box)
    if isinstance(found, Refusal):
        again = _replay_command(candidate, op, key, accuracy, atol, rtol, found)
        _show_refusal(found, again, as_json)
        raise typer.Exit(shell.EXIT_MISTAKE if found.reason.value in _NOT_JUDGED else EXIT_REFUSED)
    if as_json:
        shell.print_json({"accepted": True, "timed": timing and not replay, "found": msgspec.to_builtins(found)})
        return
    _show_accepted(found)


def _judged(
    submission: Submission, accuracy: Accuracy, cases: list[str], timed: bool, allow_weak_box: bool
) -> Verdict | Replayed | tuple[FamilyError, ...] | Refusal:
    from torch_autokern.judge import verdict
    from torch_autokern.judge.outcome import Refusal
    from torch_autokern.judge.replay import parse_case, replay

    trials = [parse_case(case) for case in cases]
    target = _target(submission)
    built = _built(submission, target, allow_weak_box)
    if isinstance(built, Refusal):
        return built
    missing = _missing_device(built)
    if missing is not None:
        return missing
    if trials:
        return replay(built, submission.key, target, accuracy, trials, allow_weak_box=allow_weak_box)
    if not timed:
        return verdict.check(built, submission.key, target, accuracy, allow_weak_box=allow_weak_box)
    return verdict.judge(built, submission.key, target, accuracy, allow_weak_box=allow_weak_box)


def _target(submission: Submission) -> Target:
    """This machine's CPU or GPU; without a GPU, one that a GPU candidate can at least be built for."""
    import torch

    from torch_autokern.runtime.target import local_target
    from torch_autokern.store.key import Target

    if submission.key.device_type == "cpu":
        return local_target()
    return local_target("cuda") if torch.cuda.is_available() else Target("cuda", "none", _ARCH_WITHOUT_DEVICE, 0)


def _missing_device(built: Artifact) -> Refusal | None:
    """A GPU candidate on a machine without a GPU: everything that can be known without running it is known by now."""
    import torch

    from torch_autokern.judge.outcome import Reason, Refusal

    if built.kind == "cpu" or torch.cuda.is_available():
        return None
    parts = [
        f"{name}: {it.registers} registers a thread, {it.static_shared_bytes + it.dynamic_shared_bytes} bytes of shared memory"
        + (f", {it.spilled_bytes} bytes spilled" if it.spilled_bytes > 0 else "")
        for name, it in built.resources.items()
    ]
    return Refusal(
        Reason.NO_DEVICE,
        f"no CUDA device is here, so the kernel was not run. It builds for {built.arch} ({built.tools['compiler']}), and "
        f"source, plan and cubin keep the rules; {'; '.join(parts)}.",
    )


def _built(submission: Submission, target: Target, allow_weak_box: bool) -> Artifact | Refusal:
    from torch_autokern.build.compile import compile_candidate
    from torch_autokern.judge.outcome import Reason, Refusal

    try:
        return compile_candidate(submission.candidate, target, key=submission.key, allow_weak_box=allow_weak_box)
    except StaticRuleError as error:
        return Refusal(Reason.STATIC_RULE, str(error))
    except BuildError as error:
        return Refusal(Reason.BUILD_FAILED, str(error))


def _replay_command(
    folder: Path, op: str | None, key: Path | None, accuracy: str, atol: float, rtol: float, refusal: Refusal
) -> str | None:
    """The one command that runs exactly the refused case; None where no input is to blame."""
    if not refusal.cases:
        return None
    words = ["autokern", "judge", str(folder)]
    words += ["--op", op] if op else []
    words += ["--key", str(key)] if key else []
    words += [] if accuracy == "stock" else ["--class", accuracy]
    words += ["--atol", repr(atol), "--rtol", repr(rtol)] if accuracy == "tolerance" else []
    for case in refusal.cases:
        words += ["--replay", case]
    return shlex.join(words)


def _show_refusal(refusal: Refusal, again: str | None, as_json: bool) -> None:
    judged = refusal.reason.value not in _NOT_JUDGED
    if as_json:
        shell.print_json({"accepted": False, "judged": judged, "refusal": msgspec.to_builtins(refusal), "replay": again})
        return
    if not judged:
        shell.say(f"autokern: could not be judged ({refusal.reason.value}): {shell.plain(refusal.message)}")
        return
    typer.echo(f"refused: {refusal.reason.value}")
    typer.echo(shell.plain(refusal.message))
    if refusal.first:
        typer.echo(f"{refusal.beyond} elements of output {refusal.output} are beyond the limit of a single one; the first:")
        for place in refusal.first:
            typer.echo(shell.plain(f"  {place.index}: got {place.got}, expected {place.expected}"))
    if refusal.error is not None and refusal.stock_error is not None:
        limit = "" if refusal.limit is None else f", limit {refusal.limit:.3g}"
        typer.echo(f"error against float64: {refusal.error:.3g}, stock's {refusal.stock_error:.3g}{limit}")
    if refusal.seed is not None:
        typer.echo(shell.plain(f"family {refusal.family}, seed {refusal.seed}"))
    if again is not None:
        typer.echo(shell.plain(f"replay: {again}"))


def _show_accepted(found: Verdict | Replayed | tuple[FamilyError, ...]) -> None:
    from torch_autokern.judge.replay import Replayed
    from torch_autokern.store.record import Verdict

    families = found if isinstance(found, tuple) else found.families
    for family in families:
        typer.echo(
            f"  {shell.plain(family.family):14} "
            f"rms {family.error_rms:.2e} (stock {family.stock_rms:.2e}, limit {family.limit_rms:.2e})"
            f"  largest {family.error_max:.2e} (stock {family.stock_max:.2e}, limit {family.limit_max:.2e})"
        )
    checks = {} if isinstance(found, tuple) else found.checks
    for name, text in checks.items():
        typer.echo(shell.plain(f"  {name}: {text}"))
    if isinstance(found, Verdict):
        for timing in found.timings:
            typer.echo(
                f"  {timing.regime}, {timing.pages} pages: stock {timing.stock_us:.1f} us, candidate "
                f"{timing.candidate_us:.1f} us, {timing.ratio:.2f}x ({timing.ratio_low:.2f} to {timing.ratio_high:.2f})"
            )
        typer.echo(f"accepted: right (class {found.accuracy_class}, {found.determinism}) and faster")
    elif isinstance(found, Replayed):
        typer.echo("accepted: the case holds")
    else:
        typer.echo("accepted: right; not timed")
