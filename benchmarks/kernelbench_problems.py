"""KernelBench's level-1 problems of our op families, from their facts: ``python -m benchmarks.kernelbench_problems DIR``.

Number, operation and shapes are the suite's (github.com/ScalingIntelligence/KernelBench); every line of the files is ours.
`--release first` takes the sizes of the first release and standard normal inputs, `--release current` (the default) today's
sizes and inputs uniform in [0, 1), `--release small` sizes that a laptop's CPU judges in seconds. Problems 13, 14 and 15 hand
in structure (symmetric, triangular) that their generators alone know: a kernel that uses it is right for those inputs only,
and our judge, which draws others, refuses it. The suite's first 12 multiplied by a diagonal matrix that it built; ours does
not.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Release = Literal["current", "first", "small"]
RELEASES: tuple[Release, ...] = ("current", "first", "small")


@dataclass(frozen=True)
class Problem:
    """One problem. `names` are the sizes' names, `body` the result in terms of the arguments, `shapes` those of the arguments;
    `made` wraps what was drawn where an argument has structure."""

    number: int
    name: str
    names: str
    sizes: dict[Release, tuple[int, ...]]
    body: str
    shapes: dict[str, str]
    made: dict[str, str]


def _problem(
    number: int, name: str, names: str, current: tuple[int, ...], first: tuple[int, ...] | None, small: tuple[int, ...],
    body: str,
    made: dict[str, str] | None = None, **shapes: str,
) -> Problem:  # fmt: skip
    sizes: dict[Release, tuple[int, ...]] = {"current": current, "first": first or current, "small": small}
    return Problem(number, name, names, sizes, body, shapes, made or {})


_SYMMETRIC, _UPPER, _LOWER = "({} + {}.T) / 2", "torch.triu({})", "torch.tril({})"
PROBLEMS: tuple[Problem, ...] = (
    _problem(1, "square_matmul", "N", (4096,), (2048,), (96,), "torch.matmul(A, B)", A="N, N", B="N, N"),
    _problem(2, "matmul", "M, K, N", (2048, 8192, 4096), (1024, 4096, 2048), (64, 192, 96), "torch.matmul(A, B)",
             A="M, K", B="K, N"),
    _problem(3, "batched_matmul", "b, m, k, n", (128, 512, 1024, 2048), (128, 128, 256, 512), (4, 32, 48, 64),
             "torch.bmm(A, B)", A="b, m, k", B="b, k, n"),
    _problem(4, "matrix_vector", "M, K", (2048, 1048576), (256, 131072), (64, 4096), "torch.matmul(A, B)", A="M, K", B="K, 1"),
    _problem(6, "large_k", "M, K, N", (256, 524288, 256), (256, 131072, 256), (16, 8192, 16), "torch.matmul(A, B)",
             A="M, K", B="K, N"),
    _problem(7, "small_k", "M, K, N", (32768, 64, 32768), (16384, 32, 16384), (256, 32, 256), "torch.matmul(A, B)",
             A="M, K", B="K, N"),
    _problem(8, "irregular", "M, K, N", (8205, 2949, 5921), None, (67, 45, 83), "torch.matmul(A, B)", A="M, K", B="K, N"),
    _problem(9, "tall_skinny", "M, N", (32768, 32), (16384, 16), (512, 16), "torch.matmul(A, B)", A="M, N", B="N, M"),
    _problem(10, "tensor3d_matmul", "n, m, k, l", (16, 1024, 2048, 768), None, (2, 32, 64, 48), "torch.matmul(A, B)",
             A="n, m, k", B="k, l"),
    _problem(11, "tensor4d_einsum", "b, i, j, l, k", (8, 256, 512, 256, 768), (16, 256, 512, 256, 768), (2, 8, 16, 32, 48),
             'torch.einsum("bijl,lk->bijk", A, B)', A="b, i, j, l", B="l, k"),
    _problem(12, "diagonal_matmul", "N, M", (4096, 4096), None, (128, 160), "A.unsqueeze(1) * B", A="N", B="N, M"),
    _problem(13, "symmetric_matmul", "N", (4096,), None, (96,), "torch.matmul(A, B)",
             {"A": _SYMMETRIC, "B": _SYMMETRIC}, A="N, N", B="N, N"),
    _problem(14, "upper_triangular_matmul", "N", (4096,), None, (96,), "torch.triu(torch.matmul(A, B))",
             {"A": _UPPER, "B": _UPPER}, A="N, N", B="N, N"),
    _problem(15, "lower_triangular_matmul", "N", (4096,), None, (96,), "torch.tril(torch.matmul(A, B))",
             {"A": _LOWER, "B": _LOWER}, A="N, N", B="N, N"),
    _problem(16, "matmul_transposed_a", "M, K, N", (2048, 8192, 4096), (1024, 4096, 2048), (64, 192, 96),
             "torch.matmul(A.T, B)", A="K, M", B="K, N"),
    _problem(17, "matmul_transposed_b", "M, K, N", (2048, 8192, 4096), (1024, 4096, 2048), (64, 192, 96),
             "torch.matmul(A, B.T)", A="M, K", B="N, K"),
    _problem(18, "matmul_transposed_both", "M, K, N", (2048, 8192, 4096), (1024, 4096, 2048), (64, 192, 96),
             "torch.matmul(A.T, B.T)", A="K, M", B="N, K"),
    _problem(23, "softmax", "batch, dim", (4096, 393216), (16, 16384), (64, 1024), "torch.softmax(A, dim=1)", A="batch, dim"),
    _problem(24, "log_softmax", "batch, dim", (4096, 393216), (16, 16384), (64, 1024), "torch.log_softmax(A, dim=1)",
             A="batch, dim"),
    _problem(36, "rms_norm", "batch, features, d1, d2", (112, 64, 512, 512), (16, 64, 256, 256), (4, 64, 32, 32),
             "A / torch.sqrt(torch.mean(A**2, dim=1, keepdim=True) + 1e-5)", A="batch, features, d1, d2"),
    _problem(40, "layer_norm", "batch, features, d1, d2", (16, 64, 256, 256), None, (4, 8, 32, 32), "self.norm(A)",
             A="batch, features, d1, d2"),
)  # fmt: skip


def file_name(problem: Problem) -> str:
    """ "36_rms_norm.py"."""
    return f"{problem.number}_{problem.name}.py"


def file_text(problem: Problem, release: Release) -> str:
    """A problem as the suite's loader, and ours, takes it."""
    draw = "torch.randn" if release == "first" else "torch.rand"
    sizes = "\n".join(f"{n} = {size}" for n, size in zip(problem.names.split(", "), problem.sizes[release], strict=True))
    init = ""
    if problem.name == "layer_norm":
        init = "\n    def __init__(self):\n        super().__init__()\n        self.norm = nn.LayerNorm((features, d1, d2))\n"
    drawn = [f"    {name} = {draw}({shape})" for name, shape in problem.shapes.items()]
    drawn += [f"    {name} = {made.replace('{}', name)}" for name, made in problem.made.items()]
    arguments = ", ".join(problem.shapes)
    body = "\n".join(drawn)
    return (
        f'"""KernelBench level 1, problem {problem.number} ({problem.name}), {release} sizes."""\n\n'
        f"import torch\nfrom torch import nn\n\n{sizes}\n\n\n"
        f"class Model(nn.Module):{init}\n    def forward(self, {arguments}):\n        return {problem.body}\n\n\n"
        f"def get_inputs():\n{body}\n    return [{arguments}]\n\n\ndef get_init_inputs():\n    return []\n"
    )


def write(folder: Path, release: Release = "current") -> list[Path]:
    """Write every problem's file into a folder, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for problem in PROBLEMS:
        path = folder / file_name(problem)
        path.write_text(file_text(problem, release))
        paths.append(path)
    return paths


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--release", choices=RELEASES, default="current")
    options = parser.parse_args()
    for path in write(options.folder, options.release):
        print(path)


if __name__ == "__main__":
    main()
