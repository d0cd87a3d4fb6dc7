"""A pack in a process that sees no compiler, on a stand-in for another CPU model and another torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pack_samples import needs_cryptography, records, softmax_key, unsigned

from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.store.pack import Pack
from torch_autokern.store.pack_build import pack_bytes
from torch_autokern.store.pack_install import install_pack
from torch_autokern.store.trust import Pin, add_pin, change_policy

ROOT = Path(__file__).parents[2]
_PROGRAM = """
import sys, shutil
assert not any(map(shutil.which, ("c++", "g++", "gcc", "cc", "clang++", "clang", "ld"))), "there is a compiler"
import torch
torch.set_num_threads({threads})
import torch_autokern as ak
from torch_autokern.runtime import arming, session, smoke, table, target
from torch_autokern.store.key import Target
from torch_autokern.store.notes import Receipt
here = target.local_target()
cpu, build = {cpu!r} or here.name, {build!r} or target.stock_build()
there = Target("cpu", cpu, here.arch, here.threads)
for module in (session, arming, smoke):
    if hasattr(module, "local_target"):
        module.local_target = lambda *args, **options: there
    if hasattr(module, "stock_build"):
        module.stock_build = lambda: build
x = torch.randn(4, 8)
model = ak.optimize(torch.nn.Softmax(-1))
def served():
    before = sum(row.hits for row in ak.stats().kernels)
    torch.testing.assert_close(model(x), torch.softmax(x.double(), -1).float())
    return sum(row.hits for row in ak.stats().kernels) - before
first = served()
(pack,) = session.session().store.packs
waiting = arming.arming_of(pack, session.session().store).waiting
assert all("autokern pack verify NAME --replay" in why for why in waiting.values()), waiting
session.session().store.add_note({digest!r}, Receipt({record!r}, there, build, 1.2, "2026-01-01T00:00:00Z"))
ak.refresh()
print(first, len(waiting), served())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("cpu", "build", "printed"),
    [("", "", "1 0 1"), ("GenuineIntel-6-143", "", "0 4 1"), ("", "2.99", "0 4 1")],
    ids=["the same machine", "another CPU model", "another torch"],
)
def test_elsewhere_without_a_compiler_calls_are_stock_until_a_receipt(state: Path, cpu: str, build: str, printed: str) -> None:
    """Nothing on PATH builds anything. One machine has one CPU and one torch that the extension is built for, so what this
    package reads of them is replaced where it decides; the pack, its libraries, the child that tries them and the calls are
    real. Python's own version needs no stand-in: nothing in a pack, a key or a target depends on it."""
    needs_cryptography()
    change_policy(state, lambda policy: add_pin(policy, Pin(unsigned().pack_id, tuple(r.record_id for r in records()))))
    assert isinstance(install_pack(unsigned(), state, read_binaries), Pack)
    assert b"python" not in pack_bytes(unsigned()).lower()
    record = records()[1]
    assert record.record.key == softmax_key(4)
    code = _PROGRAM.format(
        threads=record.record.target.threads, cpu=cpu, build=build, digest=record.record.key.digest, record=record.record_id
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": "/nonexistent", "AUTOKERN_CXX": "/nonexistent"}
    told = [sys.executable, "-c", code]
    ended = subprocess.run(told, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.strip() == printed, ended.stderr
