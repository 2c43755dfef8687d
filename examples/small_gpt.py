"""A small GPT over bytes, and the text it learns from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

NUM_BYTES = 256
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """Attention to earlier bytes, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens, width]`` to the same."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return result


class SmallGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, *, layers: int, width: int, heads: int, tokens: int) -> None:
        """Make it with random weights.

        Args:
            layers: number of blocks.
            width: of the hidden state; a multiple of ``heads``.
            heads: attention heads.
            tokens: longest text, in bytes.

        Raises:
            ValueError: ``width`` is no multiple of ``heads``.
        """
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be divided among {heads} heads")
        self.tokens = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.apply(_initialise)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map bytes ``[batch, tokens]`` to logits ``[batch, tokens, 256]``."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_byte_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy of the next bytes, in nats."""
    ids, following = batch
    return functional.cross_entropy(model(ids).flatten(0, 1), following.flatten())


def read_text(path: Path | None) -> bytes:
    """Return a file's bytes; without one, the language reference that comes with Python."""
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def batch_at(text: bytes, number: int, *, batch: int, tokens: int) -> Batch:
    """Return the pieces of text of step ``number``, always the same: bytes and those that follow them.

    Raises:
        ValueError: the text is too short.
    """
    if len(text) <= tokens:
        raise ValueError(f"a text of {len(text)} bytes is too short for pieces of {tokens}")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(text) - tokens, (batch, 1), generator=random)
    pieces = data[starts + torch.arange(tokens + 1)].long()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
