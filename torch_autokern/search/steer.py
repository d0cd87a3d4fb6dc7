"""What people tell a run, also while it runs: files in ``RUN/steer/``, read at the start of each round.

A file is JSON, ``{"action": "hint", "text": "...", "author": "..."}``. Each becomes a node with author and time, and is
moved to ``steer/taken/``; one that cannot be read is moved to ``steer/refused/`` with the reason beside it.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from torch_autokern.search.folder import given_files, refuse, take
from torch_autokern.search.nodes import Intervention
from torch_autokern.search.run import Run
from torch_autokern.store.store import utc_now

# hint: shown to every proposer. idea: an idea to be turned into kernels. ban: candidates whose source or idea holds these words
# (a regular expression) are not built. stop: end after this round.
Action = Literal["hint", "idea", "ban", "stop"]
ACTIONS = get_args(Action)
MAX_FILE_BYTES = 64 << 10


class SteerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person writes."""

    action: Action
    text: str = ""
    author: str = ""


def read_steering(run: Run, prefix: str) -> list[Intervention]:
    """Take in what lies in the folder, as nodes ``<prefix>.steer.<n>``; returns all of this round's.

    A round that is under way already (it has nodes) takes in no more, so that a run that was killed reads as one that was not.
    """
    known = [node for node in run.interventions() if node.id.startswith(f"{prefix}.steer.")]
    begun = any(node.id.startswith(f"{prefix}.") for node in run.nodes)
    if run.replaying or begun or run.folder is None:
        return known
    folder = run.folder / "steer"
    for file in given_files(folder, MAX_FILE_BYTES):
        try:
            words = msgspec.json.decode(file.data, type=SteerFile)
            if words.action == "ban":
                re.compile(words.text)
        except (msgspec.DecodeError, RecursionError, re.error) as error:
            example = '{"action": "hint", "text": "...", "author": "..."}'
            refuse(folder, file, f"not understood: {error}; expected {example} with an action of {', '.join(ACTIONS)}")
            continue
        name = f"{prefix}.steer.{len(known)}"
        node = Intervention(name, run.now(), words.action, words.text, words.author, utc_now(), file.name)
        run.add(node)
        known.append(node)
        take(folder, file)
    return known
