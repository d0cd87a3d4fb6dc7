"""The output pool: blocks come back, stay under the limit, and never carry two living results."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_kernels import D, Served, record_data, record_for

import torch_autokern as ak
from torch_autokern.errors import InvalidInputError
from torch_autokern.ops import SPECS
from torch_autokern.runtime import session as session_module
from torch_autokern.runtime.extension import extension

ROWS = 16384  # 512 KiB a result: above the smallest pooled block (256 KiB)
SIZE = ROWS * D * 4


class Softmax:
    """One served call whose results are large enough for the pool."""

    def __init__(self, served: Served) -> None:
        self.x = torch.randn(ROWS, D)
        self.stock = torch.softmax(self.x, 1)
        self.kernel = served.put_call("_softmax", [self.x], {"dim": 1, "half_to_float": False})

    def __call__(self) -> torch.Tensor:
        before = self.kernel.hits
        with ak.enabled():
            y = torch.softmax(self.x, 1)
        assert self.kernel.hits == before + 1
        return y


@pytest.fixture
def softmax(served: Served) -> Iterator[Softmax]:
    limit = extension().pool_stats()[0]
    ak.empty_cache()
    extension().pool_set_limit(8 * SIZE)
    yield Softmax(served)
    ak.empty_cache()
    extension().pool_set_limit(limit)


def pool() -> Any:
    return ak.stats().pool


def test_a_block_is_used_again_when_its_tensor_is_gone(softmax: Softmax) -> None:
    first = softmax()
    address = first.data_ptr()
    assert pool().kept_bytes == 0
    del first
    assert pool().kept_bytes == SIZE
    before = pool().reused
    again = softmax()
    assert again.data_ptr() == address and pool().reused == before + 1 and pool().kept_bytes == 0
    torch.testing.assert_close(again, softmax.stock)


def test_results_that_live_are_never_written_again(softmax: Softmax) -> None:
    kept = [softmax() for _ in range(5)]
    copies = [y.clone() for y in kept]
    assert len({y.data_ptr() for y in kept}) == 5
    for _ in range(10):
        softmax().fill_(-1.0)
    for y, copy in zip(kept, copies, strict=True):
        assert torch.equal(y, copy)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["call", "drop", "view", "empty"]), st.integers(0, 7)), max_size=25))
def test_any_order_of_calls_drops_and_views_keeps_every_living_result(steps: list[tuple[str, int]]) -> None:
    served = Served()
    softmax = Softmax(served)
    extension().pool_set_limit(4 * SIZE)
    living: list[tuple[torch.Tensor, float]] = []
    for number, (step, index) in enumerate(steps):
        if step == "call":
            y = softmax()
            y.fill_(float(number))
            living.append((y, float(number)))
        elif step == "empty":
            ak.empty_cache()
        elif living:
            y, value = living.pop(index % len(living))
            if step == "view":
                living.append((y[index % ROWS :, 1:], value))
        assert pool().kept_bytes <= 4 * SIZE
        for y, value in living:
            assert y[0, 0] == value and y[-1, -1] == value
    served.close()


def test_the_limit_is_kept(softmax: Softmax) -> None:
    extension().pool_set_limit(3 * SIZE)
    results = [softmax() for _ in range(6)]
    results.clear()
    assert pool().kept_bytes == 3 * SIZE
    extension().pool_set_limit(SIZE)
    assert pool().kept_bytes == SIZE and pool().limit_bytes == SIZE


def test_a_limit_of_0_switches_the_pool_off(softmax: Softmax) -> None:
    extension().pool_set_limit(0)
    before = pool()
    y = softmax()
    torch.testing.assert_close(y, softmax.stock)
    del y
    assert (pool().kept_bytes, pool().reused, pool().fresh) == (0, before.reused, before.fresh)


def test_small_results_do_not_go_through_the_pool(served: Served) -> None:
    x = torch.randn(4, D)
    served.put_call("_softmax", [x], {"dim": 1, "half_to_float": False})
    before = pool()
    with ak.enabled():
        torch.softmax(x, 1)
    assert (pool().reused, pool().fresh) == (before.reused, before.fresh)
    assert served.hits() == 1


def test_empty_cache_gives_everything_back(softmax: Softmax) -> None:
    results = [softmax() for _ in range(3)]
    results.clear()
    assert pool().kept_bytes == 3 * SIZE
    ak.empty_cache()
    assert pool().kept_bytes == 0
    torch.testing.assert_close(softmax(), softmax.stock)


@pytest.mark.long
def test_idle_blocks_are_given_back(softmax: Softmax) -> None:
    softmax()
    assert pool().kept_bytes == SIZE
    time.sleep(10.5)
    extension().pool_set_limit(8 * SIZE)  # any activity looks at the clock
    assert pool().kept_bytes == 0


def test_freeing_in_another_thread_gives_the_block_back(softmax: Softmax) -> None:
    results = [softmax()]
    thread = threading.Thread(target=results.clear)
    thread.start()
    thread.join()
    assert pool().kept_bytes == SIZE


def test_many_threads_take_and_free(softmax: Softmax) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            y = softmax.kernel.run([softmax.x], True)[0]
            y.fill_(float(number))
            time.sleep(0)
            if not (y[0, 0] == number and y[-1, -1] == number and y.sum() == number * y.numel()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool().kept_bytes <= 8 * SIZE


def test_views_keep_their_storage_alive(softmax: Softmax) -> None:
    y = softmax()
    view = y[5:9].t()
    expected = view.clone()
    del y
    assert pool().kept_bytes == 0
    softmax().fill_(-1.0)
    assert torch.equal(view, expected)
    del view
    assert pool().kept_bytes >= SIZE


def test_results_saved_for_backward_stay_alive(softmax: Softmax) -> None:
    x = softmax.x.clone().requires_grad_()
    with ak.enabled():
        y = torch.softmax(x, 1)
    weights = torch.randn_like(y)
    loss = (y * weights).sum()
    del y
    for _ in range(3):
        softmax().fill_(-1.0)
    loss.backward()
    stock = softmax.x.clone().requires_grad_()
    (torch.softmax(stock, 1) * weights).sum().backward()
    torch.testing.assert_close(x.grad, stock.grad)


def test_pooled_storages_can_be_resized_and_set(softmax: Softmax) -> None:
    y = softmax()
    y.resize_(2 * ROWS, D)
    torch.testing.assert_close(y[:ROWS], softmax.stock)
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(SIZE)
    z = softmax()
    z.set_(torch.arange(4.0))
    assert z.tolist() == [0, 1, 2, 3]
    w = softmax()
    w.data = torch.ones(3)
    torch.testing.assert_close(softmax(), softmax.stock)


def _double(x: torch.Tensor, queue: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, with or without us
    x.mul_(2)
    queue.put(float(x[0, 0]))


def test_pooled_results_can_be_shared_with_another_process(softmax: Softmax) -> None:
    y = softmax().share_memory_()
    assert y.is_shared()
    torch.testing.assert_close(y, softmax.stock)
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_double, args=(y, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == pytest.approx(2 * float(softmax.stock[0, 0]), rel=1e-5)
    torch.testing.assert_close(y, 2 * softmax.stock)


def test_pooled_results_save_and_load(softmax: Softmax) -> None:
    file = io.BytesIO()
    y = softmax()
    torch.save(y[:3], file)
    file.seek(0)
    assert torch.equal(torch.load(file), y[:3])
    assert torch.equal(torch.from_numpy(y.numpy()), y)


def test_inference_tensors_come_from_the_pool_too(softmax: Softmax) -> None:
    with torch.inference_mode():
        y = softmax()
        assert y.is_inference()
        torch.testing.assert_close(y, softmax.stock)
    del y
    assert pool().kept_bytes == SIZE
    assert not softmax().is_inference()


def test_pool_limit_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_POOL_MB", "3")
    assert session_module.pool_limit_bytes() == 3 << 20
    monkeypatch.setenv("AUTOKERN_POOL_MB", "lots")
    with pytest.raises(InvalidInputError, match="whole number of MiB"):
        session_module.pool_limit_bytes()
    monkeypatch.delenv("AUTOKERN_POOL_MB")
    assert 0 < session_module.pool_limit_bytes() <= 1 << 30


def test_a_word_that_is_no_size_keeps_no_kernel_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is off then, and a program that runs in stock runs with kernels too."""
    key = SPECS["_softmax"].key((torch.zeros(4, 8),), {"dim": 1, "half_to_float": False})
    current = session_module.session()
    record_id = current.store.publish(record_for(key), record_data(key)).record_id
    monkeypatch.setenv("AUTOKERN_POOL_MB", "lots")
    try:
        assert current.refresh() == 1 and record_id in current.loaded
    finally:
        current.store.clear(key.digest)
        monkeypatch.delenv("AUTOKERN_POOL_MB")
        current.refresh()
