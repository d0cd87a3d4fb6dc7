"""Strict mode says what was not served; autocast and the gradient scaler work above the router."""

from __future__ import annotations

import pytest
import torch
from tiny_kernels import BACKWARD_OPS, FORWARD_OPS, B, Block, D, assert_all_close, seen, train_step
from torch import nn

import torch_autokern as ak
from torch_autokern.errors import StrictModeError
from torch_autokern.runtime.extension import extension

X = torch.randn(B, D)
FORWARD_HITS = {op: {"hit": 1} for op in FORWARD_OPS}


def test_strict_mode_passes_what_is_served(block: Block) -> None:
    ak.optimize(block, strict=True)
    results: list[torch.Tensor] = []
    assert set(seen(lambda: results.extend(train_step(block, X)))) == {*FORWARD_OPS, *BACKWARD_OPS}


def test_strict_mode_raises_in_forward(block: Block) -> None:
    ak.optimize(block, strict=True)
    with pytest.raises(StrictModeError, match=r"aten::addmm was not served \(no_record\); see torch_autokern.explain"):
        block(X[:2])
    assert seen(lambda: torch.softmax(X, -1)) == {}  # the scope has ended
    assert_all_close([block(X)], [Block.forward(block, X)])


def test_strict_mode_raises_in_an_enabled_block_and_in_a_function(block: Block) -> None:
    with pytest.raises(StrictModeError, match="_softmax was not served"), ak.enabled(strict=True):
        torch.softmax(X[:2], -1)
    strict = ak.optimize(lambda x: torch.softmax(x, -1), strict=True)
    assert strict(X).shape == X.shape
    with pytest.raises(StrictModeError, match="_softmax was not served"):
        strict(X[:2])


def test_strict_mode_raises_in_backward(block: Block) -> None:
    ak.optimize(block, strict=True)
    loss = block(X).sum()
    extension().set_table([])
    with pytest.raises(RuntimeError, match="autokern strict mode: aten::_softmax_backward_data was not served"):
        loss.backward()


def test_strict_mode_is_asked_for_by_the_environment(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_STRICT", "1")
    ak.optimize(block)
    with pytest.raises(StrictModeError):
        block(X[:2])
    ak.optimize(block, strict=False)
    block(X[:2])


def test_strict_mode_leaves_empty_tensors_to_aten(block: Block) -> None:
    strict = ak.optimize(lambda x: torch.softmax(x, -1), strict=True)
    assert strict(X[:0]).shape == (0, D)


def test_the_users_own_runtime_errors_pass_unchanged(block: Block) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("my own words")

    model = ak.optimize(Fails(), strict=True)
    with pytest.raises(RuntimeError) as caught:
        model(X)
    assert type(caught.value) is RuntimeError and str(caught.value) == "my own words"


@pytest.mark.parametrize("inside", [True, False], ids=["optimised inside autocast", "autocast inside the model"])
def test_autocast_dtype_mismatch(block: Block, inside: bool) -> None:
    """Casting happens above the router: it sees bfloat16 products, which have no record, and returns stock's bits."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y: torch.Tensor = self.block(x)
            return y

    model = block if inside else Casting()

    def run() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return train_step(model, X)

    stock = run()
    ak.optimize(model)
    results: list[torch.Tensor] = []
    hits = seen(lambda: results.extend(run()))
    assert hits["addmm"] == {"no_record": 1}
    assert [r.dtype for r in results] == [s.dtype for s in stock]
    torch.testing.assert_close(results, stock)


def test_gradscaler_steps_as_in_stock(block: Block) -> None:
    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = (model(X) * torch.arange(1.0, B * D + 1).view(B, D)).sum()
            if step == 2:
                loss = loss * float("inf")  # the scaler skips this step
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [*(p.detach().clone() for p in model.parameters()), torch.tensor(scaler.get_scale())]

    other = Block()
    other.load_state_dict(block.state_dict())
    stock = train(other)
    ak.optimize(block)
    results: list[torch.Tensor] = []
    hits = seen(lambda: results.extend(train(block)))
    assert hits["_softmax"] == {"hit": 4}
    assert_all_close(results, stock)
    assert results[-1] == 8.0
