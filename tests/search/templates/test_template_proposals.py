"""What the templates propose for a key, and that they stay silent where they do not apply. Nothing is built here."""

from __future__ import annotations

import pytest
import torch

from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import Scalars
from torch_autokern.runtime.plan import validate
from torch_autokern.search.templates import MAX_CANDIDATES, propose
from torch_autokern.search.templates.layout import Loop, collapse, offset
from torch_autokern.store.key import KernelKey, Target

V4 = Target("cpu", "any", "x86-64-v4", 2)


def softmax_key(x: torch.Tensor, dim: int = -1, op: str = "_softmax") -> KernelKey:
    return SPECS[op].key([x], {"dim": dim, "half_to_float": False})


def norm_key(x: torch.Tensor, dims: int = 1, weight: torch.Tensor | None = None) -> KernelKey:
    scalars: Scalars = {"normalized_shape": tuple(x.shape[-dims:]), "eps": 1e-5}
    return SPECS["native_layer_norm"].key([x, weight, None], scalars)


def softmax_backward_key(*sizes: int, log: bool = False, dtype: torch.dtype = torch.float32) -> KernelKey:
    op = "_log_softmax_backward_data" if log else "_softmax_backward_data"
    x = torch.empty(sizes, dtype=dtype)
    scalars: Scalars = {"dim": 1, "input_dtype": str(dtype).removeprefix("torch.")}
    return SPECS[op].key([x, x], scalars, [x])


def norm_backward_key(sizes: tuple[int, ...], dims: int = 1, dtype: torch.dtype = torch.float32) -> KernelKey:
    x, weight = torch.empty(sizes, dtype=dtype), torch.empty(sizes[-dims:], dtype=dtype)
    mean = torch.empty(sizes[:-dims] + (1,) * dims, dtype=dtype)
    scalars: Scalars = {"normalized_shape": sizes[-dims:], "output_mask": (1, 1, 1)}
    return SPECS["native_layer_norm_backward"].key([x, x, mean, mean, weight, weight], scalars, [x, weight, weight])


KEYS = {
    "short rows": softmax_key(torch.zeros(3, 38)),
    "long rows": softmax_key(torch.zeros(3, 1000)),
    "few long rows": softmax_key(torch.zeros(2, 70001)),
    "rows beyond the cache": softmax_key(torch.zeros(64, 262144)),
    "columns": softmax_key(torch.zeros(4, 100, 64), 1),
    "large columns": softmax_key(torch.zeros(64, 1024, 512), 1),
    "log columns": softmax_key(torch.zeros(100, 64), 0, "_log_softmax"),
    "layer norm": norm_key(torch.zeros(5, 384)),
    "long layer norm": norm_key(torch.zeros(4, 64, 64, 64), 3),
    "product": SPECS["mm"].key([torch.zeros(40, 50), torch.zeros(50, 60)], {}),
    "linear": SPECS["addmm"].key([torch.zeros(384), torch.zeros(999, 384), torch.zeros(384, 384).t()], {"beta": 1, "alpha": 1}),
    "batches of products": SPECS["bmm"].key([torch.zeros(9, 38, 32), torch.zeros(9, 32, 38)], {}),
    "one row": SPECS["mm"].key([torch.zeros(1, 50), torch.zeros(60, 50).t()], {}),
    "one element": softmax_key(torch.zeros(1)),
    "no dimensions": softmax_key(torch.zeros(()), 0),
    "bfloat16 rows": softmax_key(torch.zeros(3, 38, dtype=torch.bfloat16)),
    "float16 columns": softmax_key(torch.zeros(4, 100, 64, dtype=torch.float16), 1),
    "bfloat16 layer norm": norm_key(torch.zeros(5, 384, dtype=torch.bfloat16), 1, torch.zeros(384)),
    "turned rows": softmax_key(torch.zeros(4, 50, 38).transpose(1, 2)),
    "channels last": softmax_key(torch.zeros(2, 19, 8, 8).to(memory_format=torch.channels_last), 1),
    "turned layer norm": norm_key(torch.zeros(2, 96, 49).transpose(1, 2)),
    "softmax backward": softmax_backward_key(7, 38),
    "long softmax backward": softmax_backward_key(64, 262144),
    "columns of a softmax backward": softmax_backward_key(4, 100, 64),
    "bfloat16 log-softmax backward": softmax_backward_key(7, 1000, log=True, dtype=torch.bfloat16),
    "layer norm backward": norm_backward_key((37, 384)),
    "long layer norm backward": norm_backward_key((4, 64, 64, 64), 3),
    "large layer norm backward": norm_backward_key((4096, 4096)),
    "float16 layer norm backward": norm_backward_key((3, 5, 40), 1, torch.float16),
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("arch", ["x86-64-v4", "x86-64-v3", "x86-64-v2", "aarch64"])
def test_a_supported_key_gets_a_few_distinct_candidates_with_valid_plans(name: str, arch: str) -> None:
    candidates = propose(KEYS[name], Target("cpu", "any", arch, 2))
    assert 1 <= len(candidates) <= MAX_CANDIDATES["cpu"]
    assert len({c.candidate_id for c in candidates}) == len(candidates)
    for candidate in candidates:
        validate(candidate.plan)
        assert candidate.language == "cpp" and candidate.template and candidate.idea and candidate.parameters
        assert "@" not in candidate.source, "a placeholder was left"


def test_the_first_guess_fits_the_shape() -> None:
    first = {name: propose(key, V4)[0].template for name, key in KEYS.items()}
    assert first["short rows"] == "softmax_short_rows"
    assert first["long rows"] == "softmax_long_rows"
    assert first["few long rows"] == "softmax_split"
    assert first["columns"] == "softmax_columns"
    assert first["layer norm"] == "layer_norm_rows"
    assert first["long layer norm"] == "layer_norm_split"
    assert first["linear"] == first["batches of products"] == "matmul_rows"
    assert first["one row"] == "matmul_dot"
    assert first["turned rows"] == first["channels last"] == "softmax_turned"
    assert first["turned layer norm"] == "layer_norm_turned"
    assert first["softmax backward"] == "softmax_backward_short"
    assert first["columns of a softmax backward"] == "softmax_backward_columns"
    assert first["layer norm backward"] == "layer_norm_backward_rows"
    assert first["long layer norm backward"] == "layer_norm_backward_split"


@pytest.mark.parametrize(
    "key",
    [
        softmax_key(torch.zeros(4, 8, dtype=torch.float64)),
        SPECS["mm"].key([torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)], {}),
        softmax_key(torch.zeros(40000, 8).t(), 1),  # rows that would have to be turned, and are too long for that
        norm_key(torch.zeros(40000, 8).t()),
        norm_key(torch.zeros(4, 16, dtype=torch.float64)),
        norm_key(torch.zeros(4, 8, 16).transpose(1, 2), 2),
        norm_key(torch.zeros(4, 16), 1, torch.zeros(32)[::2]),
    ],
    ids=[
        "float64",
        "float64 product",
        "long turned softmax",
        "long turned norm",
        "float64 norm",
        "transposed norm",
        "strided weight",
    ],
)
def test_what_a_template_cannot_serve_gets_no_candidate(key: KernelKey) -> None:
    assert propose(key, V4) == []


def test_misaligned_and_empty_tensors_get_no_candidate() -> None:
    key = softmax_key(torch.zeros(4, 8))
    x = key.tensors[0]
    assert x is not None
    odd = KernelKey(key.op, "cpu", (type(x)(x.dtype, x.sizes, x.strides, 1),), key.scalars, key.outputs)
    assert propose(odd, V4) == []
    assert propose(softmax_key(torch.zeros(0, 8)), V4) == []


def test_collapse_joins_only_runs_that_are_runs_in_every_tensor() -> None:
    assert collapse([Loop(4, (6, 6)), Loop(3, (2, 2)), Loop(1, (9, 9)), Loop(2, (1, 1))]) == (Loop(24, (1, 1)),)
    assert collapse([Loop(4, (3, 8)), Loop(3, (1, 2))]) == (Loop(4, (3, 8)), Loop(3, (1, 2)))


def test_offsets_address_every_element_of_a_permuted_tensor() -> None:
    x = torch.arange(2 * 3 * 5).reshape(2, 3, 5).permute(2, 0, 1)
    y = torch.arange(2 * 3 * 5).reshape(5, 2, 3)
    loops = collapse(Loop(x.shape[d], (x.stride(d), y.stride(d))) for d in range(3))
    for tensor, source in ((0, x), (1, y)):
        text = offset(loops, tensor, "i").replace("INT64_C", "").replace("/", "//")
        found = [eval(text, {"i": i}) for i in range(30)]  # noqa: S307 - our own arithmetic, as Python
        assert found == [int(v) for v in source.reshape(-1)]
