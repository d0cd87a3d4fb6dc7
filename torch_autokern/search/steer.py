"""What people tell a run, also while it runs: files in ``RUN/steer/``, written by hand or by ``autokern steer``.

A file is JSON, ``{"action": "hint", "text": "...", "author": "..."}``. Each becomes a node with author and time, and is
moved to ``steer/taken/``; one that cannot be used is moved to ``steer/refused/`` with the reason beside it. Words are taken in
at the start of a round, new limits just before it, and `pause`, `resume` (and `stop` in a pause) between any two steps
(`gate.py`).
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Literal, get_args

import msgspec

from torch_autokern.errors import InvalidInputError
from torch_autokern.search import limits
from torch_autokern.search.folder import GivenFile, given_files, refuse, take
from torch_autokern.search.manifest import check
from torch_autokern.search.nodes import Intervention
from torch_autokern.search.replies import MAX_REPLY_BYTES, author_of, read_kernel
from torch_autokern.search.run import Run
from torch_autokern.store.key import DeviceType
from torch_autokern.store.layout import temporary_name
from torch_autokern.store.store import utc_now

# hint: shown to every proposer. idea: an idea to be turned into kernels. kernel: a candidate, in the inbox's form. ban:
# candidates whose source or idea holds these words (a regular expression) are not built. answer: to a stuck run's question.
# limits: another goal, budget, number of rounds or policy (`limits.Changes`). pause, resume: stand still and go on. stop: end
# after this round.
Action = Literal["hint", "idea", "kernel", "ban", "answer", "limits", "pause", "resume", "stop"]
ACTIONS = get_args(Action)
# What a stuck run takes as an answer: anything that may change what it does next.
ANSWERS = frozenset({"hint", "idea", "kernel", "ban", "answer", "limits"})
_NEED_WORDS = frozenset({"hint", "idea", "kernel", "ban", "answer", "limits"})
MAX_FILE_BYTES = 2 * MAX_REPLY_BYTES  # a kernel inside JSON inside JSON


class SteerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person writes. `key` is a key's number in the run; without it the words are for all keys, a kernel for key 0."""

    action: Action
    text: str = ""
    author: str = ""
    key: int | None = None


def check_words(run: Run, words: SteerFile) -> None:
    """Refuse what the run could not use.

    Raises:
        InvalidInputError: says what is wrong, and what would do.
    """
    entries = sorted(run.manifest.workload.entries, key=lambda entry: -entry.stock_time_us)
    if words.action in _NEED_WORDS and not words.text.strip():
        raise InvalidInputError(f"{words.action} needs words, and there are none")
    if words.key is not None and not 0 <= words.key < len(entries):
        raise InvalidInputError(f"key {words.key} is not in this run; it has keys 0 to {len(entries) - 1}")
    if words.action == "ban":
        try:
            re.compile(words.text)
        except re.error as error:
            raise InvalidInputError(f"the ban is no regular expression: {error}") from error
    elif words.action == "kernel":
        device: DeviceType = entries[words.key or 0].key.device_type
        read_kernel(words.text, device, "brought by a person", words.author)
    elif words.action == "limits":
        try:
            changes = msgspec.json.decode(words.text, type=limits.Changes)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidInputError(f"the new limits are not understood: {error}") from error
        check(limits.changed(limits.effective(run), changes))


def pending(run: Run) -> list[tuple[GivenFile, SteerFile]]:
    """What lies in the folder and was not taken in yet, by file name; what cannot be used is moved aside."""
    if run.replaying or run.folder is None:
        return []
    folder = run.folder / "steer"
    found = []
    for file in given_files(folder, MAX_FILE_BYTES):
        try:
            words = msgspec.json.decode(file.data, type=SteerFile)
            check_words(run, words)
        except InvalidInputError as error:
            refuse(folder, file, str(error))
        except (msgspec.DecodeError, RecursionError) as error:
            example = '{"action": "hint", "text": "...", "author": "..."}'
            refuse(folder, file, f"not understood: {error}; expected {example} with an action of {', '.join(ACTIONS)}")
        else:
            found.append((file, words))
    return found


def waiting_words(run: Run) -> list[str]:
    """What lies in the folder and was not heard yet, in a few words each; changes nothing."""
    found = []
    for file in [] if run.folder is None else given_files(run.folder / "steer", MAX_FILE_BYTES):
        try:
            words = msgspec.json.decode(file.data, type=SteerFile)
        except (msgspec.DecodeError, RecursionError):
            found.append(f"{file.name} (cannot be read)")
        else:
            said = "" if words.action == "kernel" else " " + " ".join(words.text.split())[:80]
            found.append(f"{words.action}{said} (by {words.author or 'somebody'})")
    return found


def take_in(run: Run, name: str, file: GivenFile, words: SteerFile) -> Intervention:
    """Make it a node, then move the file: a kill in between shows it twice and acts once more, which is harmless."""
    assert run.folder is not None
    author = words.author or (author_of(words.text) if words.action == "kernel" else "")
    node = Intervention(name, run.now(), words.action, words.text, author, utc_now(), file.name, words.key)
    run.add(node)
    take(run.folder / "steer", file)
    return node


def read_steering(run: Run, prefix: str) -> list[Intervention]:
    """Take in what lies in the folder, as nodes ``<prefix>.steer.<n>``; returns all of this round's.

    A round that is under way already (it has nodes) takes in no more, so that a run that was killed reads as one that was not.
    """
    known = [node for node in run.interventions() if node.id.startswith(f"{prefix}.steer.")]
    if run.replaying or run.begun(prefix) is not None:
        return known
    for file, words in pending(run):
        if words.action not in ("pause", "resume"):
            known.append(take_in(run, f"{prefix}.steer.{len(known)}", file, words))
    return known


def new_words(run: Run, place: int, number: int, action: Action) -> list[Intervention]:
    """Words of one kind that a key's round `number` is the first to hear: for this key, or for all of them."""
    name = f"k{place}.r{number}"
    heard = {node.id for node in run.interventions(f"k{place}.r{number - 1}")} if number > 1 else set()
    default = 0 if action == "kernel" else place
    return [
        node for node in run.interventions(name)
        if node.action == action and node.id not in heard and (default if node.key is None else node.key) == place
    ]  # fmt: skip


def write_steering(folder: Path, words: SteerFile) -> Path:
    """Leave words for a run; they appear whole. Returns the file.

    Raises:
        InvalidInputError: the folder takes no file.
    """
    path = folder / "steer" / f"{time.time_ns():020d}-{words.action}.json"
    temporary = path.with_name(temporary_name())
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        temporary.write_bytes(msgspec.json.encode(words))
        os.replace(temporary, path)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}") from error
    return path
