"""Named sets of shapes, each with its source."""

from __future__ import annotations

from collections.abc import Sequence

from torch_autokern.report.cases import HEADLINE, PUBLISHED, Case, CaseOp, case_name
from torch_autokern.store.key import DeviceType, KernelKey

# Shapes of MiniLM-L6 on 32 sentences of 38 tokens: short rows, where stock's per-row cost shows.
MINILM = (
    Case("softmax", (32, 12, 38, 38), source="MiniLM-L6 attention"),
    Case("layer_norm", (32, 38, 384), source="MiniLM-L6 hidden states"),
)

# The CPU table of the project's targets: memory-bound rows from 38 to 4 million elements, and a strided reduction.
CPU_TABLE = (
    Case("layer_norm", (16, 64, 256, 256), -3, source="KernelBench level 1, problem 40: few long rows"),
    Case("layer_norm", (2048, 4096), source="a transformer's hidden states"),
    Case("layer_norm", (32, 38, 384), source="MiniLM-L6 hidden states"),
    Case("softmax", (1024, 65536), source="long rows"),
    Case("softmax", (64, 1024, 512), 1, source="a dimension that is not the last"),
    Case("softmax", (32, 12, 38, 38), source="MiniLM-L6 attention: many short rows"),
    Case("log_softmax", (4096, 1000), source="a classifier over ImageNet's 1,000 classes"),
)

# Products on a CPU: what MiniLM-L6 asks for on 32 sentences of 38 tokens, squares, few rows, and bfloat16.
CPU_MATMUL = (
    Case("bmm", (384, 38, 32, 38), source="MiniLM-L6 attention: scores"),
    Case("bmm", (384, 38, 38, 32), source="MiniLM-L6 attention: values"),
    Case("addmm", (1216, 384, 384), source="MiniLM-L6: projections of the attention"),
    Case("addmm", (1216, 384, 1536), source="MiniLM-L6: into the feed-forward"),
    Case("addmm", (1216, 1536, 384), source="MiniLM-L6: out of the feed-forward"),
    *(Case("mm", (n, n, n), source="small squares") for n in (64, 128, 256, 512)),
    Case("addmm", (1, 384, 1536), source="one token"),
    Case("addmm", (8, 384, 1536), source="few tokens"),
    Case("addmm", (38, 384, 384), source="one sentence"),
    Case("mm", (1216, 384, 1), source="a score for each token"),
    Case("mm", (128, 128, 128), dtype="bfloat16", source="bfloat16 on a CPU"),
    Case("bmm", (384, 38, 32, 38), dtype="bfloat16", source="bfloat16 attention scores"),
    Case("addmm", (1216, 384, 384), dtype="bfloat16", source="bfloat16 projections"),
)

# What a training step of MiniLM asks for beside its forward, and a classifier's loss.
_TRAINING: tuple[tuple[CaseOp, tuple[int, ...], int, str], ...] = (
    ("softmax_backward", (32, 12, 38, 38), -1, "MiniLM-L6 attention"),
    ("layer_norm_backward", (32, 38, 384), -1, "MiniLM-L6 hidden states"),
    ("log_softmax_backward", (4096, 1000), -1, "a classifier over ImageNet's 1,000 classes"),
    ("softmax_backward", (64, 1024, 128), 1, "a dimension that is not the last"),
    ("layer_norm_backward", (2048, 4096), -1, "a transformer's hidden states"),
)
BACKWARD = tuple(
    Case(op, sizes, dim, dtype, source)
    for dtype in ("float32", "bfloat16", "float16")
    for op, sizes, dim, source in _TRAINING
)  # fmt: skip

# 16-bit forwards on a CPU; the last two as autocast calls them, with float32 parameters.
_INFERENCE: tuple[tuple[CaseOp, tuple[int, ...], int, str], ...] = (
    ("softmax", (32, 12, 38, 38), -1, "MiniLM-L6 attention"),
    ("log_softmax", (4096, 1000), -1, "a classifier over ImageNet's 1,000 classes"),
    ("softmax", (64, 1024, 128), 1, "a dimension that is not the last"),
    ("layer_norm", (32, 38, 384), -1, "MiniLM-L6 hidden states"),
    ("layer_norm", (2048, 4096), -1, "a transformer's hidden states"),
)
HALF = (
    *(Case(op, sizes, dim, dtype, source) for dtype in ("bfloat16", "float16") for op, sizes, dim, source in _INFERENCE),
    Case("layer_norm", (32, 38, 384), -1, "bfloat16", "MiniLM-L6 under autocast", parameter_dtype="float32"),
    Case("layer_norm_backward", (32, 38, 384), -1, "bfloat16", "MiniLM-L6 under autocast", parameter_dtype="float32"),
)

# Row lengths around vector widths (16 float32 in 64 bytes), where tails are handled.
RAGGED = tuple(
    Case(op, (257, length), source="row length around a multiple of the vector width")
    for op in ("softmax", "log_softmax", "layer_norm")
    for length in (1, 3, 15, 16, 17, 31, 63, 64, 65, 1023)
)  # fmt: skip

# The GPU table of the project's targets, those rows that Case can say: long, short, odd and strided rows.
GPU_TABLE = (
    *HEADLINE,
    Case("softmax", (16, 16384), source="few rows: launch bound"),
    Case("softmax", (8192, 8192), dtype="bfloat16", source="attention scores"),
    Case("softmax", (8192, 4096), source="attention scores"),
    Case("softmax", (32768, 256), dtype="bfloat16", source="many short rows"),
    Case("softmax", (4096, 131072), dtype="bfloat16", source="a long vocabulary"),
    Case("softmax", (16, 32, 1024, 1024), dtype="bfloat16", source="eager attention of a large model"),
    Case("softmax", (64, 1024, 512), 1, source="a dimension that is not the last"),
    Case("softmax", (128, 50257), dtype="bfloat16", source="GPT-2's vocabulary: rows at odd addresses"),
    Case("layer_norm", (8192, 4096), dtype="bfloat16", source="a transformer's hidden states"),
    Case("layer_norm", (8192, 4096), source="a transformer's hidden states"),
    Case("layer_norm", (65536, 768), dtype="bfloat16", source="BERT's hidden states"),
    Case("layer_norm", (4096, 16384), dtype="bfloat16", source="wide hidden states"),
    Case("layer_norm", (65536, 128), source="short rows"),
    Case("layer_norm", (32, 4096), dtype="bfloat16", source="decoding: launch bound"),
)

# Row lengths and addresses that wide loads do not like, and lengths that one block or one cluster cannot hold.
_LENGTHS = ((262144, 1), (262144, 3), (16384, 127), (16384, 1023), (512, 50257), (64, 400000))
AWKWARD = (
    *(
        Case(op, sizes, dtype=dtype, source="16-bit rows of awkward length")
        for dtype in ("bfloat16", "float16")
        for op in ("softmax", "layer_norm")
        for sizes in _LENGTHS
    ),
    Case("log_softmax", (8192, 50257), dtype="bfloat16", source="GPT-2's loss: rows at odd addresses"),
    Case("softmax", (8191, 1025), source="one more than a vector's multiple"),
    Case("layer_norm", (8191, 1025), source="one more than a vector's multiple"),
    Case("softmax", (8192, 4096), dtype="bfloat16", alignment_bytes=2, source="a slice that starts at an odd element"),
    Case("softmax", (8192, 4096), alignment_bytes=4, source="a slice that starts at an odd element"),
    Case("layer_norm", (8192, 4096), dtype="float16", alignment_bytes=8, source="a slice that starts at every fourth element"),
    Case("layer_norm", (8192, 4096), alignment_bytes=4, source="a slice that starts at an odd element"),
)

# Gradients at a transformer's sizes.
BACKWARD_GPU = (
    Case("softmax_backward", (8, 12, 1024, 1024), dtype="bfloat16", source="GPT-2: attention of 8 x 1024 tokens"),
    Case("softmax_backward", (32, 12, 128, 128), source="BERT: attention of 32 x 128 tokens"),
    Case("softmax_backward", (4096, 4096), source="attention scores"),
    Case("log_softmax_backward", (8192, 50257), dtype="bfloat16", source="GPT-2's loss"),
    Case("layer_norm_backward", (8192, 768), dtype="bfloat16", source="GPT-2's hidden states"),
    Case("layer_norm_backward", (4096, 768), source="BERT's hidden states"),
    Case("layer_norm_backward", (8192, 4096), dtype="bfloat16", source="a large transformer's hidden states"),
    Case("layer_norm_backward", (8192, 4096), source="a large transformer's hidden states"),
)

# Products of every kind: squares, decoding, long and short sums, batches, a transformer's linear layers.
PRODUCTS = (
    Case("mm", (4096, 4096, 4096), source="the published matmul headline; float32 without tf32"),
    Case("mm", (4096, 4096, 4096), dtype="bfloat16", source="the same in bfloat16"),
    *(
        Case("mm", sizes, dtype="bfloat16", transposed=True, source="decoding: few tokens against a whole weight")
        for sizes in ((1, 4096, 4096), (8, 4096, 14336), (16, 14336, 4096), (64, 4096, 4096))
    ),
    Case("mm", (2048, 131072, 2048), source="a long sum"),
    Case("mm", (256, 262144, 256), source="KernelBench level 1, problem 6, half its sum"),
    Case("mm", (32768, 64, 32768), dtype="bfloat16", source="KernelBench level 1, problem 7, in bfloat16"),
    Case("mm", (32768, 32, 32768), source="KernelBench level 1, problem 9"),
    Case("bmm", (128, 128, 512, 1024), source="a batch of products"),
    Case("bmm", (256, 512, 64, 512), dtype="bfloat16", source="eager attention scores"),
    Case("addmm", (4096, 768, 768), source="BERT: projections of the attention"),
    Case("addmm", (4096, 768, 3072), source="BERT: into the feed-forward"),
    Case("addmm", (4096, 3072, 768), source="BERT: out of the feed-forward"),
)

SETS: dict[str, tuple[Case, ...]] = {
    "published": PUBLISHED,
    "minilm": MINILM,
    "cpu_table": CPU_TABLE,
    "cpu_matmul": CPU_MATMUL,
    "ragged": RAGGED,
    "backward": BACKWARD,
    "half": HALF,
    "headline": HEADLINE,
    "gpu_table": GPU_TABLE,
    "awkward": AWKWARD,
    "backward_gpu": BACKWARD_GPU,
    "products": PRODUCTS,
}


def keys_of(sets: Sequence[str], device: DeviceType, only: Sequence[str] = ("",)) -> list[KernelKey]:
    """The keys of named sets, each once, in order; those whose name contains one of `only`."""
    keys = {key.digest: key for name in sets for case in SETS[name] for key in [case.key(device)]}
    return [key for key in keys.values() if any(word in case_name(key) for word in only)]
