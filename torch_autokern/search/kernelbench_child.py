"""Run by `kernelbench.load_problem`, in the box: executes a problem file and says what its model computes, as JSON."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import msgspec
import torch

from torch_autokern.errors import AutokernError
from torch_autokern.runtime.function import Function
from torch_autokern.store.key import DeviceType, KernelKey

_NAMES = ("Model", "get_inputs", "get_init_inputs")


class Found(msgspec.Struct, frozen=True):
    """A problem's key, or why it has none."""

    key: KernelKey | None
    reason: str = ""


def read_problem(path: Path, device_type: DeviceType) -> Found:
    """Execute the file and read its model's `forward`, with tensors that have no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    spec = importlib.util.spec_from_file_location(path.stem if path.stem.isidentifier() else f"problem_{path.stem}", path)
    if spec is None or spec.loader is None:
        return Found(None, f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in _NAMES if not hasattr(module, name)]
    if missing:
        return Found(None, f"{path.name} does not define {', '.join(missing)}")
    with FakeTensorMode(), torch.device(device_type):
        model = module.Model(*module.get_init_inputs())
        inputs = module.get_inputs()
    name = f"kernelbench.{path.stem}"
    return Found(Function(type(model).forward, name, model).key(*inputs))


def main(arguments: list[str]) -> int:
    """`FILE DEVICE_TYPE`; the answer is the last line on standard output."""
    path, device_type = Path(arguments[0]), arguments[1]
    try:
        found = read_problem(path, "cuda" if device_type == "cuda" else "cpu")
    except AutokernError as error:
        found = Found(None, str(error))
    except Exception as error:  # noqa: BLE001 - somebody's code
        found = Found(None, f"{type(error).__name__}: {error}"[:500])
    sys.stdout.write("\n" + msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
