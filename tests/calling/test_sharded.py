"""DTensor and tensor parallelism over two gloo processes: the local calls are served on every rank, by the same kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_ranks import WORLD, on_two_ranks

way = pytest.mark.way
pytestmark = [pytest.mark.long, pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")]
B, D, HIDDEN = 4, 8, 16


class Mlp(nn.Module):
    """Two linears, as in a transformer's feed-forward part; norm and softmax replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, HIDDEN)
        self.down = nn.Linear(HIDDEN, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) to (B, 8)."""
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return y


def _both(rank: int) -> tuple[Any, Any]:
    return _train_sharded(), _softmax_of_a_dtensor()


def _table(runs: list[Any]) -> list[str]:
    """Serve what `runs` ask for, by general kernels; returns the digests of the keys."""
    from general_kernels import compute_keys
    from tiny_kernels import Served, keys_of

    from torch_autokern.runtime.extension import extension
    from torch_autokern.runtime.session import session

    session().refresh()
    extension().set_table([])
    keys = {key.digest: key for run in runs for key in keys_of(run)}
    served = Served()
    for key, native in zip(keys.values(), compute_keys(list(keys.values())), strict=True):
        served.put_native(key, native)
    served.publish_table()
    return sorted(keys)


def _sharded() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    return parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(B, D, generator=torch.Generator().manual_seed(1))
    y = model(x)
    (y * torch.arange(1.0, B * D + 1).view(B, D)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients)]


def _train_sharded() -> Any:
    from tiny_kernels import assert_all_close, seen

    import torch_autokern as ak

    torch.manual_seed(0)
    whole = Mlp()
    expected = _step(whole)
    model = _sharded()
    digests = _table([lambda: _step(model)])
    ak.optimize(model)
    mine: list[torch.Tensor] = []
    calls = seen(lambda: mine.extend(_step(model)))
    assert_all_close(mine, expected)
    return calls, digests


def _softmax_of_a_dtensor() -> Any:
    from tiny_kernels import assert_all_close, seen
    from torch.distributed.tensor import Shard, distribute_tensor

    import torch_autokern as ak

    mesh = dist.init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(2)
    x = torch.randn(2 * B, D)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    _table([lambda: torch.softmax(sharded, -1)])
    mine: list[torch.Tensor] = []

    def run() -> None:
        with ak.enabled():
            mine.append(torch.softmax(sharded, -1).full_tensor())

    calls = seen(run)
    assert_all_close(mine, [torch.softmax(x, -1)])
    return calls


@way("DTensor, tensor parallel (two processes)", "served", "below DTensor: the local shards' calls, alike on every rank")
def test_tensor_parallel_over_two_processes(watch: Any) -> None:
    """Forward, backward and gradients are those of the whole model; both ranks ask for the same keys and are served alike."""
    (trained, of_softmax), (trained_1, of_softmax_1) = on_two_ranks(_both)
    watch.take(trained[0], trained_1[0], of_softmax, of_softmax_1)
    assert trained == trained_1
    assert {"addmm", "mm", "native_layer_norm", "native_layer_norm_backward"} <= set(trained[0])
    assert of_softmax == {"_softmax": {"hit": 1}}
