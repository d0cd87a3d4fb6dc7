"""Other processes: forked and spawned workers, the kill switch, and a missing or mismatched extension."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_kernels import FORWARD_OPS, B, Block, D, Served, assert_all_close, in_a_fork, seen
from torch.utils.data import DataLoader, Dataset

import torch_autokern as ak
from torch_autokern.runtime.extension import extension

X = torch.randn(B, D)
FORWARD_HITS = {op: {"hit": 1} for op in FORWARD_OPS}


def test_fork_after_optimise(block: Block) -> None:
    stock = block(X).detach()
    ak.optimize(block)
    loss = block(X).sum()

    def child() -> None:
        assert seen(lambda: assert_all_close([block(X).detach()], [stock])) == FORWARD_HITS
        loss.backward()
        ak.restore(block)
        assert seen(lambda: block(X)) == {}
        ak.optimize(block)
        assert ak.refresh() == 0
        assert block(X).shape == X.shape

    in_a_fork(child)
    assert seen(lambda: block(X)) == FORWARD_HITS


def test_fork_while_other_threads_call(block: Block) -> None:
    """No lock of ours is left taken in the child, whatever the other threads were doing."""
    ak.optimize(block)
    big = torch.randn(16384, D)
    table = Served()
    table.put_call("_softmax", [big], {"dim": 1, "half_to_float": False})
    table.close()
    kernel = table._kernels["_softmax"][0][0]
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            kernel.run([big], True)  # takes and returns pooled blocks
            thread = threading.Thread(target=block, args=(X,))  # registers a new thread
            thread.start()
            thread.join()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()

    def child() -> None:
        for _ in range(3):
            kernel.run([big], True)
            block(X)
            thread = threading.Thread(target=block, args=(X,))
            thread.start()
            thread.join()

    try:
        for _ in range(10):
            in_a_fork(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Embedded(Dataset[torch.Tensor]):
    """Items that the optimised model computes in the worker."""

    def __init__(self, model: Block) -> None:
        self.model, self.x = model, X

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(self.x + index)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_data_loader_workers(block: Block, method: str) -> None:
    ak.optimize(block)
    with torch.no_grad():
        stock = [Block.forward(block, X + index) for index in range(6)]
    loader = DataLoader(Embedded(block), batch_size=None, num_workers=2, multiprocessing_context=method)
    assert_all_close(list(loader), stock)


def _spawned(model: Block, x: torch.Tensor, queue: Any) -> None:
    stock = model(x)
    arrived_stock = not ak.is_optimized(model)
    ak.optimize(model)
    queue.put((arrived_stock, torch.allclose(model(x), stock)))


@pytest.mark.long
def test_spawned_workers_get_a_stock_model_and_can_optimise_it(block: Block) -> None:
    ak.optimize(block)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=_spawned, args=(block, X, queue))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert queue.get() == (True, True)


def run_python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter; it must succeed."""
    env = {**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


_STOCK_AND_ONE_WARNING = """
    {before}
    import warnings, torch
    import torch_autokern as ak
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1))
    x = torch.randn(4, 8)
    stock, dump = model(x), torch._C._dispatch_dump("aten::_softmax")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ak.optimize(model) is model
        ak.optimize(model)
        function = ak.optimize(lambda x: model(x))
        ak.enable()
        with ak.enabled():
            assert torch.equal(model(x), stock)
    ak.disable(); ak.empty_cache(); ak.refresh()
    assert torch.equal(model(x), stock) and torch.equal(function(x), stock)
    assert torch._C._dispatch_dump("aten::_softmax") == dump
    assert not ak.is_optimized(model) and ak.restore(model) is model
    stats = ak.stats()
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert caught[0].filename == "<string>", caught[0].filename
    try:
        with ak.record() as recording:
            torch.softmax(x, -1)
        recorded = len(recording.workload().entries)
    except Exception as error:
        recorded = type(error).__name__ + str(error)
    assert torch._C._dispatch_dump("aten::_softmax") == dump
    print(type(caught[0].message).__name__, caught[0].message, stats.unavailable, len(stats.ops), recorded, sep=" | ")
"""
_NO_EXTENSION = "import sys; sys.modules['torch_autokern._C'] = None"
_OTHER_TORCH = (
    "import sys, types; m = types.ModuleType('torch_autokern._C'); m.built_for_torch = '1.0.0';"
    " sys.modules['torch_autokern._C'] = m"
)
_OTHER_SYSTEM = "import sys, torch, filelock, platformdirs; sys.platform = 'win32'"


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (_NO_EXTENSION, "the C++ extension cannot be loaded"),
        (_OTHER_TORCH, "built for torch 1.0.0, this is torch"),
        (_OTHER_SYSTEM, "Linux only, this is win32"),
    ],
)
def test_without_a_usable_extension_stock_runs_and_one_line_says_why(before: str, words: str) -> None:
    output = run_python(_STOCK_AND_ONE_WARNING.format(before=before))
    kind, message, unavailable, ops, recorded = output.strip().split(" | ")
    assert kind == "AutokernWarning" and words in message and words in unavailable and ops == "0"
    assert recorded.startswith("ExtensionError") and words in recorded
    if before != _OTHER_SYSTEM:
        assert "pip install" in message


def test_the_kill_switch_serves_nothing_and_still_records() -> None:
    output = run_python(_STOCK_AND_ONE_WARNING.format(before=""), AUTOKERN_DISABLE="1")
    kind, message, unavailable, _, recorded = output.strip().split(" | ")
    assert kind == "AutokernWarning" and "AUTOKERN_DISABLE=1" in message and "AUTOKERN_DISABLE=1" in unavailable
    assert recorded == "1"


def test_silent_fallback_nobody_knows_that_nothing_is_replaced(tmp_path: Path) -> None:
    """An empty store is said once, with the command that fills it, at the person's own line."""
    code = """
    import warnings, torch, torch_autokern as ak
    model = torch.nn.Linear(8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3): ak.optimize(model)
        ak.optimize(torch.nn.Linear(4, 4))
    assert caught[0].filename == "<string>"
    print(len(caught), caught[0].message)
    """
    output = run_python(code, AUTOKERN_STORE=str(tmp_path))
    assert output.startswith("1 no verified kernel for this machine") and "autokern record" in output


def test_the_process_exits_cleanly_with_live_models_and_threads() -> None:
    code = """
    import threading, time, torch, torch_autokern as ak, warnings
    warnings.simplefilter("ignore")
    model = ak.optimize(torch.nn.Linear(8, 8)); ak.enable()
    until = time.time() + 1
    def work():
        while time.time() < until: torch.softmax(model(torch.randn(4, 8)), -1)
    for _ in range(2): threading.Thread(target=work).start()  # still running when the main thread ends
    print("end")
    """
    assert run_python(code) == "end\n"


def test_the_extension_of_this_process_is_the_real_one() -> None:
    assert extension().built_for_torch.split(".")[:2] == torch.__version__.split("+")[0].split(".")[:2]


def test_fork_while_another_thread_reads_the_store(block: Block) -> None:
    """The session's lock is free in the child, also when the fork came in the middle of a refresh."""
    ak.optimize(block)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            ak.refresh()
            ak.optimize(Block())

    thread = threading.Thread(target=work)
    thread.start()

    def child() -> None:
        ak.restore(ak.optimize(Block()))
        ak.refresh()

    try:
        for _ in range(10):
            in_a_fork(child)
    finally:
        stop.set()
        thread.join()
