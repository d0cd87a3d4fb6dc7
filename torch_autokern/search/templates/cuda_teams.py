"""What the templates for rows of neighbouring elements share: a row function becomes candidates, with one team a row or with a
row in chunks for many blocks. The teams themselves are in `cuda_rows`."""

from __future__ import annotations

from dataclasses import dataclass

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.cubin_rules import parse_arch
from torch_autokern.runtime.plan import PLAN_VERSION, InputArg, KernelStep, LaunchPlan, PointerArg, Workspace, WorkspaceArg
from torch_autokern.search.templates.cuda_rows import AUTHOR, ITEM_BYTES, MAX_GRID, RowShape, Team, prelude, teams_for
from torch_autokern.store.key import Target

_LARGE_BYTES = 32 << 20  # over half the L2 of an H200: larger results are not kept there for anyone
_MAX_TEAMS = 16
PROCESSORS = 132


@dataclass(frozen=True)
class RowKernel:
    """One op over `rows` rows of one shape. `entry` names it; `code` are its device functions; `whole` the kernel for one
    team a row; `split` the two kernels for chunks, `measure` and `apply`, which leave `part_bytes` a chunk between them ("":
    rows are never cut); `dtypes` of input and output; `args` of `whole`; `measured` are the tensors that `measure` reads, whose
    rows are all held in registers."""

    entry: str
    rows: int
    shape: RowShape
    dtypes: tuple[str, str]
    args: tuple[PointerArg, ...]
    code: str
    whole: str
    split: str = ""
    part_bytes: int = 0
    measured: tuple[PointerArg, ...] = (InputArg(0),)

    @property
    def streaming(self) -> bool:
        """Whether the result is too large to stay in the cache."""
        return self.rows * self.shape.length * ITEM_BYTES[self.dtypes[1]] > _LARGE_BYTES

    def of_teams(self, team: Team, streaming: bool) -> Candidate:
        """A team a row; `streaming`: what is read and written once is not kept in the cache."""
        source = prelude(self.shape, self.rows, team, self.dtypes, streaming=streaming) + self.code + self.whole
        grid, cluster = (team.grid(self.rows), 1, 1), (team.cluster, 1, 1)
        plan = LaunchPlan(PLAN_VERSION, (KernelStep(self.entry, grid, (team.threads, 1, 1), self.args, cluster),))
        idea = (
            f"A row in the registers of {team.size} threads of {team.cluster} blocks, {team.vectors} pieces of 16 bytes each."
        )
        parameters = {"team": team.size, "threads": team.threads, "cluster": team.cluster, "streaming": streaming}
        return Candidate("cuda", source, plan, idea, AUTHOR, f"{self.entry}_cuda", dict(parameters))

    def of_chunks(self, threads: int, vectors: int, programmatic: bool) -> Candidate | None:
        """Chunks of `threads * vectors` pieces, two launches; `programmatic`: the second loads while the first runs."""
        chunks = -(-self.shape.pieces // (threads * vectors))
        blocks = self.rows * chunks
        if chunks < 2 or blocks > MAX_GRID:
            return None
        body = self.split.replace("@WAIT@", 'asm volatile("griddepcontrol.wait;" ::: "memory");' if programmatic else "")
        body = body.replace("@LEAVE@", 'asm volatile("griddepcontrol.launch_dependents;");' if programmatic else "")
        source = prelude(self.shape, self.rows, Team(threads, threads, vectors), self.dtypes, chunks=chunks) + self.code + body
        grid, block, parts = (blocks, 1, 1), (threads, 1, 1), WorkspaceArg("parts")
        steps = (
            KernelStep("measure", grid, block, (*self.measured, parts)),
            KernelStep("apply", grid, block, (*self.args, parts), programmatic=programmatic),
        )
        plan = LaunchPlan(PLAN_VERSION, steps, (Workspace("parts", self.part_bytes * blocks),))
        idea = f"Each row in {chunks} chunks for as many blocks; what they found is merged in a second launch."
        parameters = {"threads": threads, "vectors": vectors, "programmatic": programmatic}
        return Candidate("cuda", source, plan, idea, AUTHOR, f"{self.entry}_cuda_split", dict(parameters))

    def _fits(self, team: Team) -> bool:
        """Whether rows of several tensors stay in registers; 48 beside them, 32 more for edges at any address, as compiled."""
        needed = 4 * team.vectors * len(self.measured) + 48 + (0 if self.shape.aligned else 32)
        return needed <= min(255, 65536 // team.threads)

    def candidates(self, target: Target) -> list[Candidate]:
        """Best guess first."""
        hopper = parse_arch(target.arch)[0] >= 9
        teams = [team for team in teams_for(self.shape, self.rows) if hopper or team.cluster == 1]
        teams = [team for team in teams if len(self.measured) == 1 or self._fits(team)][:_MAX_TEAMS]
        found = [self.of_teams(team, self.streaming) for team in teams]
        found += [self.of_teams(team, not self.streaming) for team in teams[:4]]
        if not self.split or self.shape.pieces < 2048 or self.rows >= 512:
            return found
        options = ((256, 4, hopper), (512, 4, hopper), (512, 8, hopper), (256, 8, False))
        chunked = [candidate for option in options if (candidate := self.of_chunks(*option)) is not None]
        # A cluster is at most 16 blocks: with fewer rows than a tenth of the chip's processors only chunks fill it.
        return chunked + found if self.rows * 16 < PROCESSORS or not found else found + chunked
