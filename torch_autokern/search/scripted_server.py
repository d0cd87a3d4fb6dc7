"""An OpenAI-compatible server that answers from a script: for tests, and for trying the search without a model.

    python -m torch_autokern.search.scripted_server script.json --port 8000

The script is ``{"rules": [RULE, ...], "key": "..."}``; with a key, requests must carry it. A request is answered by the
first rule that fits and is not used up:

    match    a regular expression found in the prompt (the last message); "" fits every one
    model    a regular expression for the whole model name; "" fits every one
    times    how often the rule serves; 0: for ever
    reply    the answer's text, or any JSON value, which is sent as text
    fault    instead of or on top of a reply, one of
             "malformed"  the body is no JSON             "truncated"  half of the reply, finish_reason "length"
             "refusal"    the model declines              "rate_limit" status 429, Retry-After: `seconds`
             "timeout"    nothing for `seconds`           "error"      status 500
             "bad_request" status 400                     "drip"       the answer comes byte by byte, for ever
             "huge"       a reply of 10 MB                "die"        the server closes and is gone for `seconds`
             "echo_key"   the key comes back in the text and, with status 500, in an error
    seconds  see `fault`
    usage    false: no token counts

Tokens are counted as a fourth of the bytes. ``GET /requests`` lists the prompts that were answered.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import msgspec

HUGE_BYTES = 10 << 20
Fault = Literal[
    "", "malformed", "truncated", "refusal", "rate_limit", "timeout", "error", "bad_request", "drip", "huge", "die", "echo_key"
]  # fmt: skip


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule of a script; see the module's words."""

    match: str = ""
    model: str = ""
    times: int = 0
    reply: Any = None
    fault: Fault = ""
    seconds: float = 0.0
    usage: bool = True


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the server answers."""

    rules: tuple[Rule, ...]
    key: str = ""


class ScriptedServer:
    """A server on this machine's loopback address, with its own thread. `prompts` is what was answered, with the model's
    name."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.prompts: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self._used = [0] * len(script.rules)
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._port = port
        self._server = self._listen()

    @property
    def url(self) -> str:
        """What ``--base-url`` takes."""
        return f"http://127.0.0.1:{self._port}/v1"

    def close(self) -> None:
        """Stop; requests that wait are dropped."""
        self._closing.set()
        with self._guard:
            self._server.shutdown()
            self._server.server_close()

    def _listen(self) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"owner": self})
        server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        server.daemon_threads = True
        self._port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def die(self, seconds: float) -> None:
        """Be gone for a while, then listen on the same port again."""

        def gone() -> None:
            with self._guard:
                self._server.shutdown()
                self._server.server_close()
                if not self._closing.wait(seconds):
                    self._server = self._listen()

        threading.Thread(target=gone, daemon=True).start()

    def rule_for(self, model: str, prompt: str) -> Rule | None:
        """The rule that answers, used once more."""
        with self._guard:
            for place, rule in enumerate(self.script.rules):
                if rule.times and self._used[place] >= rule.times:
                    continue
                if re.search(rule.match, prompt) and re.fullmatch(rule.model or ".*", model):
                    self._used[place] += 1
                    self.prompts.append((model, prompt))
                    return rule
        return None

    def wait(self, seconds: float) -> None:
        """Do nothing for a while, or until the server closes."""
        self._closing.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    owner: ScriptedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Silent: a test's output is its own."""

    def do_GET(self) -> None:
        """List what was answered."""
        self._send(200, msgspec.json.encode(self.owner.prompts))

    def do_POST(self) -> None:
        """Answer a chat completion."""
        with contextlib.suppress(OSError):
            self._answer()

    def _answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        if not self.path.endswith("/chat/completions"):
            self._error(404, f"no such path: {self.path}")
            return
        if self.owner.script.key and key != self.owner.script.key:
            self._error(401, f"wrong key: {key}")
            return
        body = msgspec.json.decode(raw)
        self.owner.bodies.append(body)
        model, prompt = body["model"], body["messages"][-1]["content"]
        rule = self.owner.rule_for(model, prompt)
        if rule is None:
            self._error(500, f"the script has no rule for this prompt: {prompt[:200]}")
            return
        self._serve(rule, model, raw, key)

    def _serve(self, rule: Rule, model: str, prompt: bytes, key: str) -> None:
        text = rule.reply if isinstance(rule.reply, str) else msgspec.json.encode(rule.reply).decode()
        match rule.fault:
            case "rate_limit":
                self._error(429, "slow down", {"retry-after": f"{rule.seconds:g}"})
            case "error":
                self._error(500, "the server is unwell")
            case "bad_request":
                self._error(400, "this server does not know response_format")
            case "timeout":
                self.owner.wait(rule.seconds)
                self.close_connection = True
            case "malformed":
                self._send(200, b'{"choices": [{"message": {"content": "{\\"ideas\\"')
            case "die":
                self.owner.die(rule.seconds)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            case "drip":
                self._drip(rule.seconds)
            case "echo_key" if rule.reply is None:
                self._error(500, f"internal error while serving Bearer {key}")
            case "echo_key":
                self._reply(model, prompt, text.replace("@key@", key), rule)
            case "huge":
                self._reply(model, prompt, "x" * HUGE_BYTES, rule)
            case "truncated":
                self._reply(model, prompt, text[: len(text) // 2], rule, "length")
            case "refusal":
                self._reply(model, prompt, None, rule)
            case _:
                self._reply(model, prompt, text, rule)

    def _reply(self, model: str, prompt: bytes, text: str | None, rule: Rule, finish: str = "stop") -> None:
        message: dict[str, object] = {"role": "assistant", "content": text}
        if text is None:
            message["refusal"] = "I cannot help with that."
        answer: dict[str, object] = {
            "id": "scripted", "object": "chat.completion", "created": int(time.time()), "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        }  # fmt: skip
        if rule.usage:
            used = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len((text or "").encode()) // 4}
            answer["usage"] = {**used, "total_tokens": sum(used.values())}
        self._send(200, msgspec.json.encode(answer))

    def _drip(self, seconds: float) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        for piece in _drops():
            self.wfile.write(piece)
            self.wfile.flush()
            self.owner.wait(seconds or 0.05)

    def _error(self, status: int, words: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, msgspec.json.encode({"error": {"message": words, "type": "scripted", "code": status}}), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _drops() -> Iterator[bytes]:
    yield b"{"
    while True:
        yield b" "


def load_script(path: Path) -> Script:
    """Read a script.

    Raises:
        SystemExit: it is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"{path} is no script: {error}") from error


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="Answer chat completions from a script.")
    parser.add_argument("script", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    server = ScriptedServer(load_script(options.script), options.port)
    sys.stderr.write(f"serving {options.script} at {server.url}\n")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
