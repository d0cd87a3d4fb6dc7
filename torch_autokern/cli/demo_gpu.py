"""The demo on a GPU: the headline shapes through record, warm and optimise, then timed against stock."""

from __future__ import annotations

import msgspec
import torch

from torch_autokern import api
from torch_autokern.build.compile import toolchain
from torch_autokern.cli import shell
from torch_autokern.cli.progress import progress_bar
from torch_autokern.judge.device import device_of
from torch_autokern.judge.measure import copy_us
from torch_autokern.ops import spec_of
from torch_autokern.report.cases import HEADLINE, case_name
from torch_autokern.report.keyrow import measure_key
from torch_autokern.report.measurement import Row
from torch_autokern.runtime.extension import extension
from torch_autokern.store.key import KernelKey


class Headline(torch.nn.Module):
    """A square product, softmax over long rows and LayerNorm over few of them, as a program would hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm((64, 256, 256))

    def forward(self, a: torch.Tensor, b: torch.Tensor, scores: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Two (4096, 4096), (4096, 65536) and (16, 64, 256, 256) float32 -> (4096, 4096) and the last two shapes."""
        return a @ b, torch.softmax(scores, -1), self.norm(x)


def check_ready() -> None:
    """Fail before any work where the demo cannot run.

    Raises:
        ExtensionError: no usable extension.
        ToolchainError: no compiler for GPU kernels.
    """
    extension()
    toolchain("cuda")


def headline_part(budget_minutes: float, quick: bool, *, allow_weak_box: bool = False) -> list[Row]:
    """Record a module of the headline shapes, search kernels for it, optimise it, and time each shape as a user meets it."""
    keys = [case.key("cuda") for case in HEADLINE]
    _step(1, "a module of the headline shapes, stock: " + ", ".join(case_name(key) for key in keys))
    model = Headline().cuda()
    sizes = (4096, 4096), (4096, 4096), (4096, 65536), (16, 64, 256, 256)
    inputs = [torch.randn(size, device="cuda") for size in sizes]
    with torch.no_grad():
        stock = model(*inputs)
        _step(2, "record: which kernels does it ask for")
        with api.record() as recording:
            model(*inputs)
            torch.cuda.synchronize()
        workload = recording.workload()
        for entry in workload.entries:
            shell.say(f"      {entry.calls:5d} calls  {case_name(entry.key)}")

        _step(3, f"warm: search, prove and time kernels for them, at most {budget_minutes:g} minutes")
        torch.cuda.empty_cache()  # the judge's processes share the card
        with progress_bar() as show:
            report = api.warm(workload, budget=budget_minutes, on_event=show, allow_weak_box=allow_weak_box)
        shell.say(f"      {report}")

        _step(4, "optimise the module; compare what it returns with stock")
        api.optimize(model)
        own = model(*inputs)
        for name, mine, theirs in zip(("product", "softmax", "LayerNorm"), own, stock, strict=True):
            shell.say(f"      {name}: largest difference from stock {float((mine - theirs).abs().max()):.2e}")
        api.restore(model)
    del model, inputs, stock, own
    torch.cuda.empty_cache()
    _step(5, "time each shape against stock, interleaved")
    return [_row(key, 1.0 if quick else 4.0) for key in keys]


def _row(key: KernelKey, seconds: float) -> Row:
    shell.say(f"      timing {case_name(key)}")
    row = measure_key(key, api.enabled, seconds, pages="device")
    if spec_of(key).uses_matmul_precision:
        return row  # bytes are not what limits a product
    copied_us = copy_us(spec_of(key).bytes_moved(key) // 2, device_of(key))
    return msgspec.structs.replace(row, limit_ms=copied_us / 1000)


def _step(number: int, text: str) -> None:
    shell.say(f"[{number}/5] {text}")
