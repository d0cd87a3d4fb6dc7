"""Language models behind any OpenAI-compatible server: one request, with all that can go wrong with it.

The key comes from the environment only. Requests are paced by what the server says (429, Retry-After), tried again while
that is sensible, bounded in time and size, and held to the run's budgets before they are sent. The transcript is the run's
journal.
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import openai

from torch_autokern.errors import ModelError
from torch_autokern.search.budget import BudgetOver, Clock, Meter, Reservation
from torch_autokern.search.manifest import Ask, ModelShare
from torch_autokern.search.nodes import Reply
from torch_autokern.search.replies import MAX_REPLY_BYTES, SCHEMAS, Form
from torch_autokern.search.run import Run

MAX_BODY_BYTES = 4 << 20  # more than any kernel; a longer answer is cut off and refused
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# The HTTP library under `openai` (httpx, or httpx2 from openai 3 on): its errors come through while a body is read.
_http: Any = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
_NO_KEY = "no-key-needed"
# From the most that a server may offer to the least: how the form is asked for, and the name of the limit on tokens.
_DIALECTS = (
    ("json_schema", "max_completion_tokens"), ("json_object", "max_completion_tokens"), ("json_object", "max_tokens"),
    ("text", "max_tokens"),
)  # fmt: skip


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None


class _Failed(Exception):
    """One try failed; `again` says whether another makes sense, `pause` what the server asked for, `used` that it may have
    cost tokens."""

    def __init__(self, words: str, *, again: bool, pause: float | None = None, used: bool = False) -> None:
        super().__init__(words)
        self.again = again
        self.pause = pause
        self.used = used


class Models:
    """The models of a run, by their shares. Safe to ask from several threads."""

    def __init__(
        self, run: Run, ask: Ask, meter: Meter, clock: Callable[[], Clock], key: str | None, *, base_url: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._run = run
        self._ask = ask
        self._meter = meter
        self._clock = clock
        self._key = key
        self._base_url = base_url or ask.base_url or None
        self._sleep = sleep
        self._client: openai.OpenAI | None = None
        self._guard = threading.Lock()
        self._dialects: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def pick(self, number: int) -> str:
        """The model of request `number`: every stretch of requests has each model near its share."""
        return pick(self._ask.models, number)

    def request(self, name: str, model: str, system: str, prompt: str, form: Form) -> Reply:
        """The reply of that name: from the journal where it is there, else from the server.

        Raises:
            BudgetOver: a budget does not allow the request.
            EndOfJournal: in a replay, where it was never made.
            ModelError: the server refuses to serve at all.
        """
        known = self._run.recall(Reply, name)
        text = self._run.put(f"{system}\n{prompt}")
        if known is not None:
            if known.prompt != text:
                self._run.other_prompts.append(name)
            return known
        if self._clock().is_over():
            raise BudgetOver("time", "the time is used up")
        size = len(system.encode()) + len(prompt.encode())
        reserved = self._meter.reserve(model, size, 2, self._ask.reply_tokens)
        try:
            node = self._tries(name, model, text, system, prompt, form, reserved)
            self._run.add(node)
            return node
        finally:
            self._meter.release(reserved)

    def _tries(
        self, name: str, model: str, text: str, system: str, prompt: str, form: Form, reserved: Reservation
    ) -> Reply:  # fmt: skip
        began = time.monotonic()
        attempts, used = 0, 0
        while True:
            attempts += 1
            self._wait(model, began)
            try:
                answer = self._send(model, system, prompt, form, reserved)
                return self._reply(name, model, text, answer, attempts, used, reserved)
            except _Failed as failed:
                used += failed.used
                pause = self._pause(attempts, failed)
                left = self._clock().left()
                late = time.monotonic() - began + pause > self._ask.patience_seconds or (left is not None and pause >= left)
                # A try that may have cost something is not repeated: what is held covers one.
                if not failed.again or failed.used or late:
                    tokens = (reserved.tokens_in, reserved.reply_tokens) if used else (0, 0)
                    words = self._run.redactor.clean(str(failed))[:2000]
                    money = self._meter.cost(model, *tokens)
                    return Reply(name, self._run.now(), model, text, "", *tokens, money, attempts, words, charged=bool(used))
                with self._guard:
                    until = time.monotonic() + pause
                    self._not_before[model] = max(self._not_before.get(model, 0.0), until)

    def _wait(self, model: str, began: float) -> None:
        """Keep away from a server that asked for a pause."""
        with self._guard:
            pause = self._not_before.get(model, 0.0) - time.monotonic()
        if pause > 0:
            self._sleep(min(pause, max(0.0, self._ask.patience_seconds - (time.monotonic() - began))))

    def _pause(self, attempts: int, failed: _Failed) -> float:
        if failed.pause is not None:
            return failed.pause
        longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempts - 1))
        return float(longest) * random.uniform(0.5, 1.0)

    def _send(self, model: str, system: str, prompt: str, form: Form, reserved: Reservation) -> _Answer:
        while True:
            dialect = self._dialects.get(model, 0)
            try:
                return self._once(model, system, prompt, form, reserved.reply_tokens, _DIALECTS[dialect])
            except openai.BadRequestError as error:
                if dialect + 1 == len(_DIALECTS):
                    raise _Failed(f"the server refuses the request: {error}", again=False) from error
                self._dialects[model] = dialect + 1
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                words = self._run.redactor.clean(str(error))
                raise ModelError(
                    f"{model}: the server refuses to serve: {words}; check --base-url, --model and the key"
                ) from None
            except openai.RateLimitError as error:
                raise _Failed(f"rate limit: {error}", again=True, pause=_retry_after(error.response)) from error
            except openai.APITimeoutError as error:
                raise _Failed("no answer in time", again=False, used=True) from error
            except openai.APIConnectionError as error:
                raise _Failed(f"the server cannot be reached: {error.__cause__ or error}", again=True) from error
            except openai.APIStatusError as error:
                again = error.status_code >= 500 or error.status_code in (408, 409)
                raise _Failed(
                    f"status {error.status_code}: {error}", again=again, pause=_retry_after(error.response)
                ) from error
            except _http.TimeoutException as error:
                raise _Failed("the answer stopped in the middle", again=False, used=True) from error
            except (_http.HTTPError, _http.StreamError) as error:
                raise _Failed(f"the answer broke off: {error}", again=False, used=True) from error

    def _once(self, model: str, system: str, prompt: str, form: Form, tokens: int, dialect: tuple[str, str]) -> _Answer:
        extra: dict[str, Any] = {dialect[1]: tokens}
        if dialect[0] == "json_schema":
            schema = {"name": form, "schema": SCHEMAS[form], "strict": False}
            extra["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif dialect[0] == "json_object":
            extra["response_format"] = {"type": "json_object"}
        messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        left = self._clock().left()
        seconds = max(0.1, self._ask.request_seconds if left is None else min(left, self._ask.request_seconds))
        deadline = time.monotonic() + seconds
        extra["timeout"] = openai.Timeout(seconds, connect=min(10.0, seconds))
        create = self._openai().chat.completions.with_streaming_response.create
        with create(model=model, messages=messages, **extra) as response:
            body = b""
            for piece in response.iter_bytes():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise _Failed(f"the answer has more than {MAX_BODY_BYTES} bytes", again=False, used=True)
                if time.monotonic() > deadline:
                    raise _Failed(f"the answer took more than {seconds:.0f} s", again=False, used=True)
        try:
            return msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise _Failed(f"the answer is not of the protocol: {error}", again=False, used=True) from error

    def _openai(self) -> openai.OpenAI:
        with self._guard:
            if self._client is None:
                # Retries are ours, so that they are counted, paced and in the journal.
                self._client = openai.OpenAI(
                    api_key=self._key or _NO_KEY, base_url=self._base_url, max_retries=0
                )  # fmt: skip
            return self._client

    def _reply(
        self, name: str, model: str, text: str, answer: _Answer, attempts: int, used: int, reserved: Reservation
    ) -> Reply:  # fmt: skip
        choice = answer.choices[0] if answer.choices else _Choice(_Message())
        content, refusal = choice.message.content or "", choice.message.refusal
        usage = answer.usage
        charged = usage is None or usage.prompt_tokens < 0 or usage.completion_tokens < 0
        tokens = (reserved.tokens_in, len(content.encode("utf-8", "replace")))
        if usage is not None and not charged:
            tokens = (usage.prompt_tokens, usage.completion_tokens)
        error = ""
        if refusal or choice.finish_reason == "content_filter":
            error = f"the model declined: {self._run.redactor.clean(refusal or 'filtered')[:500]}"
        elif len(content) > MAX_REPLY_BYTES:
            error, content = f"the answer has {len(content)} characters; at most {MAX_REPLY_BYTES} are read", content[:4096]
        elif not content:
            error = "the answer is empty"
        kept = self._run.put(content) if content else ""
        money = self._meter.cost(model, *tokens)
        return Reply(
            name, self._run.now(), model, text, kept, *tokens, money, attempts, error, refused=bool(refusal),
            cut=choice.finish_reason == "length", charged=charged,
        )  # fmt: skip


def pick(models: Sequence[ModelShare], number: int) -> str:
    """Model of request `number` (0, 1, ...): a golden-ratio sequence over the shares, so that it is the same in every
    replay."""
    total = sum(model.share for model in models)
    point = (0.5 + number * 0.6180339887498949) % 1.0 * total
    for model in models:
        point -= model.share
        if point < 0:
            return model.name
    return models[-1].name


def _retry_after(response: Any) -> float | None:
    words = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(words)) if words else None
    except ValueError:
        return None
