"""State of a candidate on a GPU: other streams, other work beside it, and a captured graph replayed with new contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torch_autokern.judge.clock import capture
from torch_autokern.judge.device import finish
from torch_autokern.judge.inputs import InputSet
from torch_autokern.judge.outcome import Reason
from torch_autokern.judge.remembered import Results

if TYPE_CHECKING:
    from torch_autokern.judge.verify import CandidateCode, PoisonedRuns

_SLEEP_CYCLES = 2_000_000  # about a millisecond
_BUSY_BYTES = 128 << 20
_TURNS = 8


class StreamChecks:
    """The checks of one candidate on two input sets. `make_scratch` gives memory for one more set, for the time of one check;
    `holds(which, results)` says whether results are right for set `which`; `enter(phase, calls)` says what comes.

    Results are gone before the next ones are made: two sets and the results of two streams are 16 GB for a 4 GB tensor.
    """

    def __init__(
        self, code: CandidateCode, sets: Sequence[InputSet], make_scratch: Callable[[], InputSet],
        holds: Callable[[int, Results], bool],
        runner: PoisonedRuns, enter: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._code = code
        self._sets = sets
        self._make_scratch = make_scratch
        self._holds = holds
        self._runner = runner
        self._enter = enter
        self._device = next(t.device for t in sets[0].tensors if t is not None)

    def checks(self) -> dict[str, Callable[[], str]]:
        """Check name to what runs it, raises `RefusedError` and otherwise says what passed."""
        return {
            "side stream": self._beside_other_work,
            "two streams": self._from_two_streams,
            "captured graph": self._in_a_graph,
        }

    def _beside_other_work(self) -> str:
        """The call must wait for the stream that it is made on, and for no other: its inputs are written late on that stream,
        while the default stream keeps multiprocessors and memory busy."""
        self._enter("side stream", 2 * _TURNS)
        source, target = (torch.empty(_BUSY_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2))
        scratch, stream = self._make_scratch(), torch.cuda.Stream(self._device)
        for turn in range(_TURNS):
            scratch.copy_from(self._sets[(turn + 1) % 2])
            finish(self._device)
            for _ in range(8):
                target.copy_(source)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_SLEEP_CYCLES)
                scratch.copy_from(self._sets[turn % 2])
                results = self._code.run(scratch.tensors)
            finish(self._device)
            self._require(turn % 2, results, "beside other work, its inputs written late on the calling stream")
            del results
        return f"passed: {_TURNS} calls behind late writes on a stream of their own, with copies running beside them"

    def _from_two_streams(self) -> str:
        self._enter("two streams", 2 * _TURNS)
        streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        finish(self._device)
        for _ in range(_TURNS // 2):
            both: list[Results] = []
            for stream, inputs in zip(streams, self._sets, strict=True):
                with torch.cuda.stream(stream):
                    both.append(self._code.run(inputs.tensors))
            finish(self._device)
            for which in range(2):
                self._require(which, both[which], "on two streams at once")
            both.clear()
        return f"passed: {_TURNS} calls on two streams in turn"

    def _in_a_graph(self) -> str:
        self._enter("captured graph", 8)
        scratch = self._make_scratch()
        scratch.copy_from(self._sets[0])
        try:
            graph, kept = capture(lambda: [self._code.run(scratch.tensors)], self._device)
        except RuntimeError as error:
            words = str(error).splitlines()[0]
            raise self._runner.refused(Reason.BAD_PLAN, f"a call cannot be captured in a graph: {words}") from error
        (results,) = kept
        assert isinstance(results, tuple)
        for which in (1, 0):
            scratch.copy_from(self._sets[which])
            for result in results:
                if result is not None:
                    result.fill_(torch.nan)
            graph.replay()
            finish(self._device)
            self._require(which, results, "in a captured graph that was replayed with new contents")
        return "passed: replayed with other contents at the same addresses"

    def _require(self, which: int, results: Results, where: str) -> None:
        if not self._holds(which, results):
            raise self._runner.refused(Reason.STALE_RESULT, f"{where}, results differ from those of the same values alone.")
