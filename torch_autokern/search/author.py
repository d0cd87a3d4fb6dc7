"""The proposer `llm`: ideas in words first, then several kernels from each, then mending, then lessons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch_autokern.build.candidate import Candidate
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.runtime.plan import encode_plan
from torch_autokern.search import prompting
from torch_autokern.search.budget import BudgetOver
from torch_autokern.search.llm import Models
from torch_autokern.search.nodes import Idea, Reply
from torch_autokern.search.replies import Form, read_ideas, read_kernel, read_lessons
from torch_autokern.search.run import EndOfJournal, Run
from torch_autokern.search.tried import Brief, Offer, Tried, parents

AT_ONCE = 8
MOST_LESSONS = 3
R = TypeVar("R")
T = TypeVar("T")


class Author:
    """See `Proposer` and `Mender`. Replies are in the journal, so its offers follow from them."""

    name = "llm"
    derives = True

    def __init__(self, run: Run, models: Models, accuracy: Accuracy) -> None:
        self._run = run
        self._models = models
        self._accuracy = accuracy
        self._system = prompting.template("system")

    def propose(self, brief: Brief) -> Sequence[Offer]:
        """See `Proposer`: people's ideas first, then the model's own."""
        task = prompting.task(brief, self._accuracy)
        ideas = list(brief.wishes)
        first = self._number(brief)
        model = self._models.pick(first)
        prompt = prompting.fill("ideas", task=task, count=brief.ask.ideas)
        name = f"{brief.name}.llm.ideas"
        found = self._side_by_side(brief, [0], lambda _: self._ask(
            name, model, prompt, "ideas", lambda text: read_ideas(text, brief.ask.ideas)))  # fmt: skip
        ideas += [(text, model) for texts in found for text in texts or ()]
        if brief.stops:
            return []
        self._stop_without_models(brief, name, bool(ideas))
        jobs = [(i, j) for i in range(len(ideas)) for j in range(brief.ask.kernels)]
        kin = tuple(one.node.candidate_id for one in parents(brief.tried)[0])
        for number, (text, author) in enumerate(ideas):
            self._keep_idea(Idea(f"{brief.name}.llm.i{number}", self._run.now(), text, self.name, author, kin))

        def write(job: tuple[int, int]) -> Offer | None:
            i, j = job
            text, author = ideas[i]
            pen = self._models.pick(first + 1 + i * brief.ask.kernels + j)
            words = prompting.fill(
                "kernel", task=task, idea=text, number=j + 1, count=brief.ask.kernels, language=prompting.language_of(brief)
            )  # fmt: skip
            whose = pen if author == model else f"{author}, written by {pen}"
            made = self._kernel(f"{brief.name}.llm.i{i}.c{j}", pen, words, brief, text, whose, kin)
            return None if made is None else Offer(f"i{i}.c{j}", made, text)

        return [offer for offer in self._side_by_side(brief, jobs, write) if offer is not None]

    def repair(self, brief: Brief, failed: Sequence[Tried], attempt: int) -> Sequence[Offer]:
        """See `Mender`."""
        task = prompting.task(brief, self._accuracy)
        first = self._number(brief) + 500 + 100 * attempt

        def mend(job: tuple[int, Tried]) -> Offer | None:
            number, one = job
            pen = self._models.pick(first + number)
            refusal = one.refusal
            assert refusal is not None
            words = prompting.fill(
                "repair", task=task, idea=one.candidate.idea, language=one.candidate.language, source=one.candidate.source,
                failed_plan=encode_plan(one.candidate.plan).decode(), refusal=prompting.refusal_words(refusal),
            )  # fmt: skip
            place = one.node.id.removeprefix(f"{brief.name}.llm.") + f".f{attempt}"
            made = self._kernel(
                f"{brief.name}.llm.{place}", pen, words, brief, one.candidate.idea, pen, (one.node.candidate_id,)
            )
            return None if made is None else Offer(place, made, f"mended: {one.candidate.idea}", one.node.id)

        return [offer for offer in self._side_by_side(brief, list(enumerate(failed)), mend) if offer is not None]

    def lessons(self, brief: Brief, fresh: Sequence[Tried]) -> Sequence[str]:
        """See `Mender`."""
        lines = [f"- {one.candidate.idea} (by {one.candidate.author}): {prompting.outcome_words(one)}" for one in fresh]
        task = prompting.task(brief, self._accuracy)
        prompt = prompting.fill("lesson", task=task, round="\n".join(lines), count=MOST_LESSONS)
        model = self._models.pick(self._number(brief) + 999)
        found = self._side_by_side(brief, [0], lambda _: self._ask(
            f"{brief.name}.llm.lessons", model, prompt, "lessons", lambda text: read_lessons(text, MOST_LESSONS)))  # fmt: skip
        return [text for texts in found for text in texts or ()]

    def _keep_idea(self, idea: Idea) -> None:
        """An idea is noted whether or not a kernel comes of it, so that it is not had again."""
        if not self._run.replaying and self._run.known(Idea, idea.id) is None:
            self._run.add(idea)

    def _number(self, brief: Brief) -> int:
        """A number for this round's first request; consecutive ones follow."""
        return ((brief.round - 1) * 97 + brief.place) * 1000

    def _kernel(
        self, name: str, model: str, prompt: str, brief: Brief, idea: str, author: str, kin: tuple[str, ...]
    ) -> Candidate | None:  # fmt: skip
        device = brief.key.device_type
        return self._ask(name, model, prompt, "kernel", lambda text: read_kernel(text, device, idea, author, kin))

    def _ask(self, name: str, model: str, prompt: str, form: Form, read: Callable[[str], R]) -> R | None:
        """Ask, and once more where the answer cannot be used and that may be mended."""
        reply = self._models.request(name, model, self._system, prompt, form)
        reason = self._problem(reply)
        if reason == "":
            try:
                return read(self._run.text(reply.text))
            except InvalidInputError as error:
                reason = str(error)
        if reason is None:
            return None
        if reply.cut:
            reason = f"it was cut off after {reply.tokens_out} tokens; be shorter. ({reason})"
        words = prompting.fill("again", prompt=prompt.strip(), reason=reason[: prompting.MAX_MESSAGE_CHARS])
        second = self._models.request(f"{name}.again", model, self._system, words, form)
        if self._problem(second) != "":
            return None
        try:
            return read(self._run.text(second.text))
        except InvalidInputError:
            return None

    def _problem(self, reply: Reply) -> str | None:
        """ "" where there is something to read; None where asking again makes no sense: refused, or nobody answers."""
        if reply.error and (reply.refused or reply.tokens_in == 0):
            return None
        return reply.error

    def _stop_without_models(self, brief: Brief, name: str, has_ideas: bool) -> None:
        reply = self._run.known(Reply, name)
        if reply is not None and reply.error and not reply.refused and reply.tokens_in == 0 and not has_ideas:
            brief.stops.append(BudgetOver("no_model", f"no model answers: {reply.error}"))

    def _side_by_side(self, brief: Brief, jobs: Sequence[T], work: Callable[[T], R | None]) -> list[R | None]:
        """Do all jobs, several at once; where a budget ends, keep what the others gave."""
        found: list[R | None] = []
        with ThreadPoolExecutor(min(AT_ONCE, max(1, len(jobs))), thread_name_prefix="autokern-ask") as pool:
            for future in [pool.submit(work, job) for job in jobs]:
                try:
                    found.append(future.result())
                except (BudgetOver, EndOfJournal) as over:
                    brief.stops.append(over)
                    found.append(None)
        return found
