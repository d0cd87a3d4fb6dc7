"""Where NVRTC, its headers and Triton are on this machine. Nothing is loaded here: only boxed children load compilers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch_autokern.errors import ToolchainError

INSTALL = "pip install torch_autokern[cuda]"
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.(\d+\.\d+)")


@dataclass(frozen=True)
class Nvrtc:
    """NVRTC: `libraries` in the order in which they are loaded, `include` folders, the packages that the child imports;
    `links`: nvJitLink is among the libraries."""

    version: str
    libraries: tuple[Path, ...]
    links: bool
    include: tuple[Path, ...]
    packages: dict[str, Path]


@dataclass(frozen=True)
class Triton:
    """Triton: its version and the folders (package and metadata, which names its back ends) that the child needs."""

    version: str
    packages: dict[str, Path]


@lru_cache(maxsize=1)
def find_nvrtc() -> Nvrtc:
    """Find NVRTC and the toolkit headers: installed packages first, then CUDA_HOME and the system, as `cuda-pathfinder` looks.

    Raises:
        ToolchainError: one of them is missing; with the command that installs it.
    """
    bindings, finder = _package("cuda.bindings"), _package("cuda.pathfinder")
    if bindings is None or finder is None:
        raise ToolchainError(f"CUDA C++ needs NVIDIA's bindings to NVRTC (cuda-bindings): {INSTALL}")
    from cuda.pathfinder import locate_nvidia_header_directory

    found = {name: locate_nvidia_header_directory(name) for name in ("nvrtc", "cudart", "cccl", "nvjitlink")}
    places = {name: Path(place.abs_path) for name, place in found.items() if place is not None and place.abs_path}
    if "nvrtc" not in places or "cudart" not in places:
        raise ToolchainError(f"CUDA C++ needs NVRTC and the CUDA headers (nvidia-cuda-nvrtc, nvidia-cuda-runtime): {INSTALL}")
    libraries = [path for folder in _library_folders(places["nvrtc"]) for path in sorted(folder.glob("libnvrtc*.so.*"))]
    builtins = [path for path in libraries if _BUILTINS.fullmatch(path.name)]
    compilers = [path for path in libraries if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)]
    if not builtins or not compilers:
        raise ToolchainError(f"no libnvrtc beside its headers in {places['nvrtc']}: {INSTALL}")
    match = _BUILTINS.fullmatch(builtins[-1].name)
    version = match[1] if match else ""
    include = tuple(dict.fromkeys(places[name] for name in ("cudart", "cccl") if name in places))
    packages = {"cuda/bindings": bindings, "cuda/pathfinder": finder}
    folders = _library_folders(places["nvjitlink"]) if "nvjitlink" in places else ()
    linkers = [path for folder in folders for path in sorted(folder.glob("libnvJitLink.so.*"))][:1]
    return Nvrtc(version, (builtins[-1], compilers[-1], *linkers), bool(linkers), include, packages)


def _library_folders(include: Path) -> tuple[Path, ...]:
    # targets/<platform>/include in a system's toolkit has targets/<platform>/lib beside it.
    real = include.resolve()
    return tuple(folder for folder in (real.parent / "lib", real.parent / "lib64") if folder.is_dir())


@lru_cache(maxsize=1)
def find_triton() -> Triton:
    """Find Triton.

    Raises:
        ToolchainError: it is not installed, or has no back end for NVIDIA.
    """
    package = _package("triton")
    if package is None or not (package / "backends" / "nvidia" / "bin" / "ptxas").exists():
        raise ToolchainError(f"Triton kernels need triton with its NVIDIA back end: {INSTALL}")
    distribution = importlib.metadata.distribution("triton")
    metadata = next((path for path in package.parent.glob("triton-*.dist-info") if path.is_dir()), None)
    packages = {"triton": package} | ({metadata.name: metadata} if metadata else {})
    return Triton(distribution.version, packages)


def _package(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]).resolve() if places else None
