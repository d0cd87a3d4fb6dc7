"""Sixteen readers while packs are installed, replaced and removed: each sees a whole pack or none, never half of one."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from pack_samples import needs_cryptography, pack_of, publics, records, split

from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.store.pack import Pack
from torch_autokern.store.pack_install import install_pack, open_packs, remove_pack
from torch_autokern.store.trust import Pin, add_key, add_pin, change_policy

READERS = 16
SECONDS = 12.0


def _read(folder: str, until: float, queue: Any) -> None:
    os.environ["AUTOKERN_STORE"] = folder
    opened, refused, missing = 0, [], 0
    while time.time() < until:
        found = open_packs(read_binaries)
        refused += [str(f.outcome) for f in found.found if not isinstance(f.outcome, Pack)]
        missing += not found.packs
        for pack in found.packs:
            assert len(list(pack.records())) == len(pack) and not pack.refusals
            opened += 1
    queue.put((opened, refused[:3], missing))


@pytest.mark.long
@pytest.mark.parametrize("removing", [False, True])
def test_readers_see_whole_packs_while_they_come_and_go(trusted: Path, removing: bool) -> None:
    needs_cryptography()
    packs = [split(pack_of(*records(), version=version)) for version in range(1, 5)]
    for public in publics():
        change_policy(trusted, lambda policy, public=public: add_key(policy, public))  # type: ignore[misc]
    for envelope in packs:
        change_policy(trusted, lambda policy, envelope=envelope: add_pin(policy, Pin(envelope.pack_id, rollback=True)))  # type: ignore[misc]
    assert isinstance(install_pack(packs[0], trusted, read_binaries), Pack)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    until = time.time() + SECONDS
    readers = [context.Process(target=_read, args=(str(trusted), until, queue)) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    changes = 0
    while time.time() < until:
        if removing:
            remove_pack(trusted, "tiny")
        assert isinstance(install_pack(packs[changes % len(packs)], trusted, read_binaries), Pack)
        changes += 1
    found = [queue.get(timeout=60) for _ in readers]
    for reader in readers:
        reader.join(60)
        assert reader.exitcode == 0
    assert changes >= 3 and all(opened for opened, _, _ in found)
    assert not [words for _, refused, _ in found for words in refused]
    if not removing:
        assert not any(missing for _, _, missing in found), "a replaced pack is never away"
