"""The inbox: a folder through which people and programs bring kernels to a run while it goes on.

```
RUN/inbox/k0-r2.brief.md       what is asked for: the same words that a model gets
RUN/inbox/<name>.json          a reply: {"language": "cpp", "source": "...", "plan": {...}, "idea": "...", "author": "..."}
RUN/inbox/<name>/              or a folder with kernel.cpp (.cu, .py), plan.json and, if you like, idea.txt and author.txt
RUN/inbox/taken/               replies that the journal has
RUN/inbox/refused/             replies that could not be used, each with <name>.error.txt beside it
```

Write a reply under a hidden name (``.x``) and rename it, or within two seconds.  Any brief of the run may be answered at
any time; in a run over several keys a reply names its key's number: ``k1-anything.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from torch_autokern.build.candidate import Candidate
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.search import prompting
from torch_autokern.search.budget import Clock
from torch_autokern.search.folder import SETTLED_SECONDS, GivenFile, given_files, refuse, take
from torch_autokern.search.outcome import describe_key
from torch_autokern.search.replies import MAX_REPLY_BYTES, author_of, read_kernel
from torch_autokern.search.tried import Brief, Offer, parents
from torch_autokern.store.layout import temporary_name

_SOURCES = {"kernel.cpp": "cpp", "kernel.cu": "cuda", "kernel.py": "triton"}
_POLL_S = 0.5


class Inbox:
    """See `Proposer` and `Receiver`. `wait_seconds`: how long a round waits for a first reply where there is none yet."""

    name = "inbox"
    derives = False

    def __init__(
        self, folder: Path, accuracy: Accuracy, wait_seconds: float = 0.0, clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._accuracy = accuracy
        self._wait = wait_seconds
        self._clock = clock
        self._sleep = sleep
        self._open: list[GivenFile] = []

    def propose(self, brief: Brief) -> Sequence[Offer]:
        """See `Proposer`."""
        self._write_brief(brief)
        offers = self._read(brief)
        began = time.monotonic()
        while not offers and time.monotonic() - began < self._wait and not (self._clock and self._clock.is_over()):
            self._sleep(_POLL_S)
            offers = self._read(brief)
        return offers

    def taken(self) -> None:
        """See `Receiver`."""
        for file in self._open:
            take(self._folder, file)
        self._open = []

    def _read(self, brief: Brief) -> list[Offer]:
        offers: list[Offer] = []
        self._open = []
        kin = tuple(one.node.candidate_id for one in parents(brief.tried)[0])
        for file in [*given_files(self._folder, MAX_REPLY_BYTES), *_given_folders(self._folder)]:
            if not _is_for(file.name, brief.place):
                continue
            try:
                if not file.data:
                    raise InvalidInputError(f"it is empty, or larger than {MAX_REPLY_BYTES} bytes")
                candidate = self._candidate(file, brief, kin)
            except InvalidInputError as error:
                if file.age_seconds >= SETTLED_SECONDS:
                    refuse(self._folder, file, f"{file.name}: {error}")
                continue
            self._open.append(file)
            # Named by content: the same whatever else lies in the folder when a killed run reads it again.
            place = "i" + hashlib.sha256(file.data).hexdigest()[:12] + ".c0"
            if all(offer.place != place for offer in offers):
                offers.append(Offer(place, candidate, candidate.idea))
        return offers

    def _candidate(self, file: GivenFile, brief: Brief, kin: tuple[str, ...]) -> Candidate:
        try:
            text = file.data.decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"it is no text: {error}") from error
        candidate = read_kernel(text, brief.key.device_type, "brought through the inbox", "inbox", kin)
        return msgspec.structs.replace(candidate, author=author_of(text) or "inbox")

    def _write_brief(self, brief: Brief) -> None:
        """The brief appears whole or not at all; a full disk costs the brief and nothing else."""
        path = self._folder / f"k{brief.place}-r{brief.round}.brief.md"
        task = prompting.task(brief, self._accuracy)
        form = __doc__.split("```")[1].strip() if __doc__ else ""
        text = f"# {describe_key(brief.key)}, round {brief.round}\n\n{task}\n## How to answer\n\n```\n{form}\n```\n"
        temporary = self._folder / temporary_name()
        with contextlib.suppress(OSError):
            temporary.write_text(text)
            os.replace(temporary, path)
        with contextlib.suppress(OSError):
            temporary.unlink()


def _is_for(name: str, place: int) -> bool:
    head = name.partition("-")[0]
    is_key = head[:1] == "k" and head[1:].isdigit() and "-" in name
    return int(head[1:]) == place if is_key else place == 0


def _given_folders(folder: Path) -> list[GivenFile]:
    """Replies that are folders, as the JSON that they stand for."""
    found = []
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    for name in names:
        if name.startswith(".") or name in ("taken", "refused"):
            continue
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder / name, *(folder / name).iterdir()))
            found.append(GivenFile(name, as_reply(folder / name), time.time() - newest))
    return found


def as_reply(folder: Path) -> bytes:
    """A folder's kernel as the JSON that it stands for.

    Raises:
        OSError: it cannot be read.
    """
    texts: dict[str, bytes] = {}
    for name in (*_SOURCES, "plan.json", "idea.txt", "author.txt"):
        path = folder / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_REPLY_BYTES:
            texts[name] = path.read_bytes()
    language = next((words for name, words in _SOURCES.items() if name in texts), "cpp")
    source = next((texts[name] for name in _SOURCES if name in texts), b"")
    reply: dict[str, object] = {
        "language": language, "source": source.decode(errors="replace"),
        "idea": texts.get("idea.txt", b"").decode(errors="replace"),
        "author": texts.get("author.txt", b"").decode(errors="replace"),
    }  # fmt: skip
    try:
        reply["plan"] = msgspec.json.decode(texts.get("plan.json", b""))
    except (msgspec.DecodeError, RecursionError):
        reply["plan"] = None
    return msgspec.json.encode(reply)
