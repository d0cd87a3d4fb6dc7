"""Build of the C++ extension; everything declarative is in pyproject.toml.

The extension is built against the installed torch (``pip install --no-build-isolation``). Without torch or without a C++
compiler the package installs as pure Python: stock PyTorch runs, and ``autokern doctor`` prints the rebuild command.
"""

from __future__ import annotations

import os
import shutil
import sys
from glob import glob
from typing import Any

from setuptools import setup

SOURCES = sorted(glob("csrc/*.cpp"))
HEADERS = sorted(glob("csrc/*.h"))


def notice(reason: str) -> dict[str, Any]:
    """Say why there is no extension, and return the empty build."""
    print(
        f"torch-autokern: the C++ extension is NOT built: {reason}.\n"
        "torch-autokern: every call stays stock PyTorch until it is; `autokern doctor` prints the command.",
        file=sys.stderr,
    )
    return {}


def extension() -> dict[str, Any]:
    """Arguments of `setup` for the extension, or none with a notice."""
    if not SOURCES:
        return notice("there are no sources in csrc/")
    if not sys.platform.startswith("linux"):
        return notice(f"{sys.platform} is not supported yet (Linux only)")
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        return notice(f"torch cannot be imported here ({error}); install torch, then build with --no-build-isolation")
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        return notice(f"no C++ compiler ({compiler}, g++) is on PATH")
    # -fopenmp when compiling only: at::parallel_for is header code that calls GOMP_*, which torch's own OpenMP runtime
    # provides. Linking with -fopenmp would load a second runtime with a thread pool of its own.
    # The C++ standard is the one that this torch's BuildExtension adds.
    flags = [
        "-O2",
        "-fno-plt",
        "-g0",
        "-fopenmp",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        f'-DAUTOKERN_TORCH_VERSION="{torch.__version__}"',
    ]
    module = cpp_extension.CppExtension(
        "torch_autokern._C", SOURCES, depends=HEADERS, extra_compile_args={"cxx": flags}, extra_link_args=["-Wl,--as-needed"]
    )
    # Kept between builds, so that a change in one file compiles one file; one folder for each Python and torch.
    objects = f"build/cp{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}"
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension.with_options()},
        "options": {"build_ext": {"build_temp": objects}},
    }


if __name__ == "__main__":
    setup(**extension())
