"""A run's folder: manifest, append-only journal of nodes, and the texts that nodes name by hash.

```
RUN/manifest.json    what was asked
RUN/journal.jsonl    checksummed nodes, in order (`lines.py`)
RUN/blobs/<sha256>   prompts, replies, sources, plans
RUN/inbox/           briefs out, replies in (`inbox.py`)
RUN/steer/           what people tell the run (`steer.py`)
RUN/stuck/           reports on keys that got no further (`stuck.py`)
```

A run is a function of its manifest and of what came in from outside, and everything that came in is a node. So *resume* and
*replay* are the same thing: run the loop again, and take from the journal whatever is there (`Run.recall`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from filelock import FileLock, Timeout

from torch_autokern.build.candidate import Candidate
from torch_autokern.errors import InvalidInputError, RunError
from torch_autokern.search.lines import append_line, whole_lines
from torch_autokern.search.manifest import SCHEMA, Manifest
from torch_autokern.search.nodes import Intervention, Node, Outcome, Reply, RoundEnd, Stage, Stop
from torch_autokern.search.redact import Redactor
from torch_autokern.store.key import canonical_json
from torch_autokern.store.layout import temporary_name

MANIFEST, JOURNAL, BLOBS = "manifest.json", "journal.jsonl", "blobs"
MAX_JOURNAL_BYTES = 1 << 30
MAX_BLOB_BYTES = 4 << 20
_LOCK = ".lock"
_decoder = msgspec.json.Decoder(Node)
N = TypeVar("N", bound=Node)


class EndOfJournal(Exception):
    """A replay asked for something that the run never did."""


class Run:
    """The journal of one run, in a folder or (without one) in memory. Safe to use from several threads of one process.

    `replaying`: nothing may be added; what is missing raises `EndOfJournal`.
    """

    def __init__(
        self, folder: Path | None, manifest: Manifest, *, replaying: bool = False, redactor: Redactor | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.replaying = replaying
        self.redactor = redactor or Redactor(())
        self.nodes: list[Node] = []
        # What a replay finds: where it derives something else than the run did, what it had no use for, and the candidates.
        self.differences: list[str] = []
        self.other_prompts: list[str] = []
        self.unread: set[str] = set()
        self.derived: dict[str, Candidate] = {}
        self._by_id: dict[tuple[type, str, str], Node] = {}
        self._texts: dict[str, str] = {}
        self._begun: dict[str, int] = {}
        self._guard = threading.RLock()
        self._started = time.monotonic()
        self._before = 0.0
        if folder is not None and (folder / JOURNAL).exists():
            for node in read_nodes(folder / JOURNAL):
                self._keep(node)
            self._before = max((node.at for node in self.nodes), default=0.0)
            if not replaying:
                self._forget_unanswered()

    def elapsed(self) -> float:
        """Seconds that this run has worked, in all of its lives."""
        return self._before + (0.0 if self.replaying else time.monotonic() - self._started)

    def stand_still(self, seconds: float) -> None:
        """Seconds that passed in waiting for a person: the run's clock leaves them out."""
        self._started += seconds

    def begun(self, round_name: str) -> int | None:
        """Where the journal has the first node of a round ("k0.r2"), or None."""
        return self._begun.get(round_name)

    def now(self) -> float:
        """The time stamp of a new node."""
        return round(self.elapsed(), 3)

    def recall(self, kind: type[N], node_id: str, stage: Stage | str = "") -> N | None:
        """The node of that kind and id, or None where it is still to be made.

        Raises:
            EndOfJournal: in a replay, where it was never made.
        """
        found = self.known(kind, node_id, stage)
        if found is None and self.replaying:
            raise EndOfJournal(node_id)
        return found

    def known(self, kind: type[N], node_id: str, stage: Stage | str = "") -> N | None:
        """As `recall`, for what may be missing in a replay too."""
        found = self._by_id.get((kind, node_id, stage))
        if found is not None and self.unread:
            self.unread.discard(place_of(found))
        return found  # type: ignore[return-value]

    def every(self, kind: type[N]) -> list[N]:
        """All nodes of a kind, in order."""
        with self._guard:
            return [node for node in self.nodes if isinstance(node, kind)]

    def add(self, node: Node) -> None:
        """Append a node, durably. Outcomes and replies come before anything that depends on them.

        Raises:
            RunError: the disk takes no more; the run cannot go on, and what is there is whole.
        """
        if self.replaying:
            raise EndOfJournal(node.id)
        with self._guard:
            if self.folder is not None:
                # Keys of servers never reach the disk, also where a server sends one back in its answer.
                body = self.redactor.clean(canonical_json(node).decode()).encode()
                node = _decoder.decode(body)
                try:
                    append_line(self.folder / JOURNAL, body)
                except OSError as error:
                    raise _full(self.folder, error) from error
            self._keep(node)

    def put(self, text: str) -> str:
        """Keep a text and return its name."""
        text = self.redactor.clean(text)
        raw = text.encode("utf-8", "surrogatepass")
        name = hashlib.sha256(raw).hexdigest()
        with self._guard:
            if name in self._texts:
                return name
            self._texts[name] = text
            if self.folder is None or self.replaying:
                return name
            path = self.folder / BLOBS / name
            if path.exists():
                return name
            temporary = path.with_name(temporary_name())
            try:
                with temporary.open("xb") as file:
                    file.write(raw)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise _full(self.folder, error) from error
        return name

    def write_beside(self, folder: str, name: str, text: str) -> None:
        """A text for people; a disk that does not take it costs the text and nothing else."""
        if self.folder is None or self.replaying:
            return
        path = self.folder / folder / name
        temporary = path.with_name(temporary_name())
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True, mode=0o700)
            temporary.write_text(self.redactor.clean(text))
            os.replace(temporary, path)
        with contextlib.suppress(OSError):
            temporary.unlink()

    def text(self, name: str) -> str:
        """A kept text by its name.

        Raises:
            RunError: it is missing or altered.
        """
        with self._guard:
            if name not in self._texts:
                if self.folder is None:
                    raise RunError(f"text {name[:12]} is not in this run")
                self._texts[name] = _read_blob(self.folder / BLOBS / name, name)
            return self._texts[name]

    def _keep(self, node: Node) -> None:
        self._begun.setdefault(".".join(node.id.split(".", 2)[:2]), len(self.nodes))
        self.nodes.append(node)
        stage = node.stage if isinstance(node, Outcome) else ""
        self._by_id[type(node), node.id, stage] = node

    def _forget_unanswered(self) -> None:
        """Requests that no server answered when the run stopped are made again."""
        if not (self.nodes and isinstance(self.nodes[-1], Stop) and self.nodes[-1].reason == "no_model"):
            return
        for node in reversed(self.nodes):
            if isinstance(node, RoundEnd):
                break
            if isinstance(node, Reply) and node.error:
                self._by_id.pop((Reply, node.id, ""), None)

    def interventions(self, prefix: str = "") -> list[Intervention]:
        """What people had said when the round `prefix` began (its own steering included), or so far."""
        begun = self.begun(prefix)
        early = self.nodes if not prefix or begun is None else self.nodes[:begun]
        return [
            node for place, node in enumerate(self.nodes)
            if isinstance(node, Intervention) and (place < len(early) or node.id.startswith(f"{prefix}.steer."))
        ]  # fmt: skip


def place_of(node: Node) -> str:
    """A node's kind, id and stage in words."""
    stage = f" ({node.stage})" if isinstance(node, Outcome) else ""
    return f"{type(node).__name__} {node.id}{stage}"


def create(folder: Path, manifest: Manifest, redactor: Redactor) -> Run:
    """Start a run in a new or empty folder.

    Raises:
        InvalidInputError: the folder holds something else.
        RunError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(name != _LOCK for name in os.listdir(folder)):
            raise InvalidInputError(f"{folder} is not empty and holds no run; name a new folder with --out")
        for name in (BLOBS, "inbox", "steer"):
            (folder / name).mkdir(mode=0o700)
        body = redactor.clean(msgspec.json.format(canonical_json(manifest), indent=2).decode())
        temporary = folder / temporary_name()
        temporary.write_text(body)
        temporary.replace(folder / MANIFEST)
    except OSError as error:
        raise _full(folder, error) from error
    return Run(folder, manifest, redactor=redactor)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / MANIFEST).is_file()


def open_run(folder: Path, *, replaying: bool = False, redactor: Redactor | None = None) -> Run:
    """Open a run to go on with it, or to replay it.

    Raises:
        InvalidInputError: no run, or one of another version.
    """
    try:
        raw = (folder / MANIFEST).read_bytes()
        manifest = msgspec.json.decode(raw, type=Manifest)
    except OSError as error:
        raise InvalidInputError(
            f"{folder} holds no run: {error.strerror}; start one with: autokern search KEY --out {folder}"
        ) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(f"{folder / MANIFEST} is no manifest of a run ({error}); expected schema {SCHEMA}") from error
    if manifest.schema != SCHEMA:
        raise InvalidInputError(f"{folder} has schema {manifest.schema!r}; this version reads {SCHEMA!r}")
    return Run(folder, manifest, replaying=replaying, redactor=redactor)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process writes a run.

    Raises:
        InvalidInputError: another process works on it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with FileLock(folder / _LOCK, timeout=0, mode=0o600, fallback_to_soft=False):
            yield
    except Timeout as error:
        raise InvalidInputError(f"another process works on {folder}; steer it through its folder, or wait") from error


def read_nodes(path: Path) -> list[Node]:
    """All whole nodes of a journal. Ten thousand take well under a second."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_JOURNAL_BYTES else b""
    except OSError:
        return []
    found: list[Node] = []
    for body in whole_lines(data):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            found.append(_decoder.decode(body))
    return found


def _read_blob(path: Path, name: str) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; the run's folder is not whole") from error
    if hashlib.sha256(raw).hexdigest() != name:
        raise RunError(f"{path} was altered: its content does not have the hash that names it")
    return raw.decode("utf-8", "surrogatepass")


def _full(folder: Path, error: OSError) -> RunError:
    words = error.strerror or str(error)
    return RunError(f"cannot write to {folder}: {words}; what is there is whole: make room and run the same command again")
