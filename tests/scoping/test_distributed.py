"""DistributedDataParallel and fully sharded training over gloo, on two processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_ranks import WORLD, on_two_ranks

pytestmark = [pytest.mark.long, pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")]


def _train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Three steps on data of this rank's own; returns parameters and the last output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    y = torch.empty(0)
    for step in range(3):
        torch.manual_seed(100 + 10 * step + rank)
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        y = model(x)
        (y * torch.arange(1.0, 33.0).view(4, 8)).sum().backward()
        optimizer.step()
    return [*(p.detach().clone() for p in model.parameters()), y.detach()]


def _models() -> tuple[nn.Module, nn.Module]:
    from tiny_kernels import Block

    torch.manual_seed(0)
    mine = Block()
    stock = Block()
    stock.load_state_dict(mine.state_dict())
    return mine, stock


def _serve(model: nn.Module) -> Any:
    from tiny_kernels import Served, train_step

    from torch_autokern.runtime.extension import extension
    from torch_autokern.runtime.session import session

    session().refresh()
    extension().set_table([])
    served = Served()
    served.put_all(lambda: train_step(model, torch.randn(4, 8)))
    return served


def _compare(rank: int, wrap: Callable[[nn.Module], nn.Module], order: str) -> str:
    from tiny_kernels import assert_all_close

    import torch_autokern as ak

    mine, stock = _models()
    served = _serve(mine)
    mine = ak.optimize(wrap(mine)) if order == "optimise outside" else wrap(ak.optimize(mine))
    results, expected = _train(mine, rank), _train(wrap(stock), rank)
    local = [[t.to_local() if hasattr(t, "to_local") else t for t in tensors] for tensors in (results, expected)]
    assert_all_close(*local)
    for op in ("addmm", "_softmax", "_softmax_backward_data", "native_layer_norm_backward", "mm"):
        assert served.hits(op) == 3, (op, served.hits(op))
    return "right and served"


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fully_shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (WORLD,))
    fully_shard(model, mesh=mesh)
    return model


CASES: dict[str, Callable[[int], str]] = {
    "DDP around an optimised model": lambda rank: _compare(rank, _ddp, "optimise inside"),
    "an optimised DDP": lambda rank: _compare(rank, _ddp, "optimise outside"),
    "fully_shard, then optimise": lambda rank: _compare(rank, _fully_shard, "optimise outside"),
    "optimise, then fully_shard": lambda rank: _compare(rank, _fully_shard, "optimise inside"),
}


def _case(rank: int, case: str) -> str:
    return CASES[case](rank)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_in_stock(case: str) -> None:
    assert on_two_ranks(_case, case) == ["right and served"] * WORLD
