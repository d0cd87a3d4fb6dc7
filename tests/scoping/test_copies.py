"""Copies of an optimised model: stock, whole, and free of any trace of this package."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_kernels import FORWARD_OPS, B, Block, D, assert_all_close, seen, train_step
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import torch_autokern as ak

X = torch.randn(B, D)
FORWARD_HITS = {op: {"hit": 1} for op in FORWARD_OPS}


class OwnState(Block):
    """A class that copies its whole `__dict__`, slot included."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def _dict_copy(model: nn.Module) -> nn.Module:
    other = type(model).__new__(type(model))
    other.__dict__.update(model.__dict__)
    return other


COPIES = {
    "deepcopy": copy.deepcopy, "copy": copy.copy, "torch.save": _saved, "__dict__": _dict_copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),  # noqa: S301 the bytes are this test's own
}  # fmt: skip


@pytest.mark.parametrize("kind", [Block, OwnState])
@pytest.mark.parametrize("name", COPIES)
def test_deepcopy_and_pickle_of_a_wrapped_model(block: Block, name: str, kind: type[Block]) -> None:
    """The copy runs itself, never the original, and is stock until it is optimised again."""
    model = kind()
    model.load_state_dict(block.state_dict())
    ak.optimize(model)
    other = COPIES[name](model)
    assert type(other) is kind
    expected = model(X)
    assert seen(lambda: other(X)) == {}
    assert_all_close([other(X)], [expected])
    if name not in ("copy", "__dict__"):  # those share the parameters
        with torch.no_grad():
            other.linear.weight.zero_()
        assert not torch.allclose(other(X), expected)
    else:
        other.forward = lambda x: 3 * x  # type: ignore[method-assign]
        assert torch.equal(other(X), 3 * X)
        del other.forward
    assert_all_close([model(X)], [expected])
    ak.optimize(other)
    assert seen(lambda: other(X)) == FORWARD_HITS
    assert seen(lambda: model(X)) == FORWARD_HITS
    ak.restore(other)
    assert seen(lambda: model(X)) == FORWARD_HITS


def test_a_copy_never_refers_to_the_original(block: Block) -> None:
    model = ak.optimize(Block())
    other, original = copy.deepcopy(model), weakref.ref(model)
    assert "_compiled_call_impl" not in vars(other)
    del model
    gc.collect()
    assert original() is None
    assert other(X).shape == X.shape


def test_saved_bytes_are_those_of_a_stock_model(block: Block) -> None:
    stock = pickle.dumps(block)
    ak.optimize(block)
    assert pickle.dumps(block) == stock
    assert b"autokern" not in pickle.dumps(ak.optimize(OwnState()))


_LOADER = """
import sys
sys.modules["torch_autokern"] = None  # any import of it fails
sys.path.insert(0, sys.argv[2])
import torch
class Block(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(self.norm(self.linear(x)), -1)
import types
module = types.ModuleType("tiny_kernels")
module.Block = Block
Block.__module__ = "tiny_kernels"
sys.modules["tiny_kernels"] = module
model, x, y = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(model(x), y)
print("loaded")
"""


def test_a_saved_model_loads_where_this_package_is_absent(block: Block, tmp_path: Path) -> None:
    ak.optimize(block)
    torch.save((block, X, block(X).detach()), tmp_path / "model.pt")
    done = subprocess.run(
        [sys.executable, "-c", _LOADER, str(tmp_path / "model.pt"), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "loaded\n", done.stderr


def test_class_parameters_state_dict_and_attributes_stay_the_users(block: Block) -> None:
    before, keys, kind, called = dict(vars(block)), list(block.state_dict()), type(block), type(block).__call__
    listed, printed = dir(block), repr(block)
    ak.optimize(block)
    assert type(block) is kind and type(block).__call__ is called and kind is Block
    assert list(block.state_dict()) == keys and repr(block) == printed
    changed = {name for name, value in vars(block).items() if name not in before or before[name] is not value}
    assert changed == {"_compiled_call_impl"}
    assert set(dir(block)) == set(listed)
    assert block.forward.__func__ is Block.forward
    ak.restore(block)
    assert vars(block) == before


def test_is_optimized_tells_the_copy_from_the_original(block: Block) -> None:
    assert not ak.is_optimized(block)
    ak.optimize(block)
    other = copy.deepcopy(block)
    assert ak.is_optimized(block) and not ak.is_optimized(other)
    assert any("copy of an optimised model is stock" in note for note in ak.explain(other, X).notes)


def test_an_optimised_model_can_be_collected(block: Block) -> None:
    model = ak.optimize(Block())
    model(X).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_data_parallel_replicas_run_themselves(block: Block) -> None:
    """What `replicate` does to each module: a shallow copy of `__dict__`, then parameters of its own."""
    ak.optimize(block)
    replica = block._replicate_for_data_parallel()
    for name, module in block.named_children():
        copied = module._replicate_for_data_parallel()
        copied._former_parameters = {}
        for key, parameter in module._parameters.items():
            value = (parameter.detach() * 2).requires_grad_()
            setattr(copied, key, value)
        setattr(replica, name, copied)
    expected = torch.softmax(replica.norm(replica.linear(X)), -1)
    results: list[torch.Tensor] = []
    assert seen(lambda: results.append(replica(X))) == FORWARD_HITS  # a replica is the same model, so it is served
    assert_all_close(results, [expected])
    assert not torch.allclose(block(X), expected)


def test_weight_tying(block: Block) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = block
            self.second = Block()
            self.second.linear.weight = self.first.linear.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.second(self.first(x))
            return y

    model = Tied()
    stock = train_step(model, X)
    ak.optimize(model)
    assert model.second.linear.weight is model.first.linear.weight
    assert_all_close(train_step(model, X), stock)
    assert copy.deepcopy(model).second.linear.weight is not model.first.linear.weight


def test_parametrizations(block: Block) -> None:
    parametrizations.weight_norm(block.linear)
    stock = train_step(block, X)
    ak.optimize(block)
    assert_all_close(train_step(block, X), stock)
    parametrize.remove_parametrizations(block.linear, "weight")
    assert_all_close([block(X).detach()], [stock[0]])
    parametrizations.spectral_norm(block.linear).eval()
    expected = Block.forward(block, X)
    assert_all_close([block(X)], [expected])


def test_changing_an_optimised_model_changes_what_runs(block: Block) -> None:
    ak.optimize(block)
    block(X)
    block.linear = nn.Linear(D, D)
    assert_all_close([block(X)], [torch.softmax(block.norm(block.linear(X)), -1)])
    block.forward = lambda x: x * 0  # type: ignore[method-assign]
    assert torch.equal(block(X), torch.zeros_like(X))


def test_to_half_and_back(block: Block) -> None:
    ak.optimize(block)
    half = block.double()(X.double())
    assert half.dtype == torch.float64
    assert_all_close([block.float()(X)], [half.float()])
