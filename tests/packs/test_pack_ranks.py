"""`check_ranks` over gloo on two processes: one hash where all agree, else the difference by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from two_ranks import on_two_ranks

import torch_autokern as ak
from torch_autokern.runtime.ranks import _Choice, _difference

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def test_alone_there_is_one_rank(state: Path) -> None:
    report = ak.check_ranks()
    assert report and report.same and report.ranks == 1 and len(report.digest) == 64 and not report.differences


def test_the_coarsest_difference_is_named() -> None:
    mine = _Choice("", "2.13.0 (stock build 2.13)", "an H200", {"tiny": "3 abc"}, {"mm at 0, eager stock": "r1"})
    assert _difference(mine, mine) == ""
    cases: dict[str, dict[str, Any]] = {
        "torch version is '2.11'": {"torch_version": "2.11", "packs": {}},
        "device is 'an H100'": {"device": "an H100"},
        "switched off is 'AUTOKERN_DISABLE'": {"switched_off": "AUTOKERN_DISABLE"},
        "pack tiny is absent, on rank 0 3 abc": {"packs": {}},
        "kernel of mm at 0, eager stock is r2, on rank 0 r1": {"kernels": {"mm at 0, eager stock": "r2"}},
    }
    for words, fields in cases.items():
        other = _Choice(**{name: fields.get(name, getattr(mine, name)) for name in _Choice.__struct_fields__})
        assert words in _difference(mine, other)


def _check(rank: int, folder: str, differ: bool) -> tuple[list[str], str]:
    os.environ["AUTOKERN_STORE"] = f"{folder}/{rank if differ else 0}"
    return list(ak.check_ranks().differences), ak.check_ranks().digest


@pytest.mark.long
def test_two_ranks_with_one_store_agree(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir(mode=0o700)
    found = on_two_ranks(_check, str(tmp_path), False)
    assert found[0] == found[1] and found[0][0] == []


@pytest.mark.long
def test_two_ranks_with_different_packs_name_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pack_samples import good, needs_cryptography, publics, split

    from torch_autokern.runtime.pack_facts import read_binaries
    from torch_autokern.store.pack import Pack
    from torch_autokern.store.pack_install import install_pack
    from torch_autokern.store.trust import add_key, change_policy

    needs_cryptography()
    for rank in range(2):
        (tmp_path / str(rank)).mkdir(mode=0o700)
    for public in publics():
        change_policy(tmp_path / "1", lambda policy, public=public: add_key(policy, public))  # type: ignore[misc]
    assert isinstance(install_pack(split(good()), tmp_path / "1", read_binaries), Pack)
    found = on_two_ranks(_check, str(tmp_path), True)
    for words, _ in found:
        assert len(words) == 1 and words[0].startswith("rank 1: pack tiny is 3 ") and words[0].endswith("on rank 0 absent")
    assert found[0][1] != found[1][1]
