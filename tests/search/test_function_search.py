"""A search for a whole function's kernel: the models are told what it computes, its limit is measured, its kernel is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from search_samples import KEY_SECRET, TARGET, ask_for, forgetful_story, search, store_at

from torch_autokern.judge.outcome import Accuracy
from torch_autokern.ops.function import function_spec, op_name
from torch_autokern.ops.graph import capture, listing
from torch_autokern.search import prompting
from torch_autokern.search.ceiling import measure_ceiling
from torch_autokern.search.replay import replay
from torch_autokern.search.scripted_server import Script, ScriptedServer
from torch_autokern.search.tried import Brief
from torch_autokern.store.key import KernelKey


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)


def key_of(body: object, *tensors: torch.Tensor) -> KernelKey:
    graph = capture(body, tensors)  # type: ignore[arg-type]
    return function_spec(op_name("rms_norm", graph), graph.text).key(tensors, {})


KEY = key_of(rms_norm, torch.randn(8, 38))


def test_prompt_of_a_function_lists_its_calls() -> None:
    text = prompting.task(Brief(KEY, TARGET, 0, 1, ask_for(), None, ()), Accuracy())
    for words in (
        "The function rms_norm, as one kernel", "argument0 (tensor)", "v0 = aten.pow.Tensor_Scalar(argument0, 2)",
        "v1 = aten.mean.dim(v0, [1], True)", "v2 = aten.add.Tensor(v1, 1e-05)", "return v4", "sizes [8, 38]",
    ):  # fmt: skip
        assert words in text, words
    assert '"nodes"' not in text, "the graph is told once, in words"


def test_every_kind_of_argument_has_words() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.var_mean(x.to(torch.bfloat16).float() + torch.ones(3), 1)  # type: ignore[return-value]

    words = listing(capture(body, [torch.randn(2, 3)]), ["x"])
    assert "torch.bfloat16" in words and "device=the arguments' device" in words and "return v4[0], v4[1]" in words


@pytest.mark.parametrize(
    ("body", "has_rate"), [(lambda x: x.exp(), False), (lambda x: torch.relu(x @ x), True)], ids=["elementwise", "product"]
)
def test_limit_of_a_function_is_measured(body: object, has_rate: bool) -> None:
    found = measure_ceiling(key_of(body, torch.randn(256, 256)), TARGET)
    assert found.stock_us > 0 and found.limit_us > 0 and (found.flops_per_s > 0) == has_rate


def test_a_search_of_rounds_stores_a_kernel_of_a_function(tmp_path: Path) -> None:
    server = ScriptedServer(Script(forgetful_story(), KEY_SECRET))
    report = search(tmp_path / "run", ask_for(server.url), KEY)
    server.close()
    assert report.search.keys[0].ratio == 2.1
    keys = [stored.record.key for stored in store_at(tmp_path / "store").records()]
    assert keys and all(key == KEY for key in keys)
    assert replay(tmp_path / "run", records=False).holds
