"""A decoder whose caches of keys and values are buffers, written one row per token: states of a compiled model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class CachedLayer(nn.Module):
    """Attention over all tokens so far, and a linear layer."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, width: int, num_heads: int, num_tokens: int) -> None:
        """Make caches of zeros: (1, num_heads, num_tokens, width / num_heads) each."""
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        shape = (1, num_heads, num_tokens, width // num_heads)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return (1, tokens, width) and write the tokens' rows of the caches."""
        parts = self.project(self.norm(x)).chunk(3, dim=-1)
        queries, keys, values = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        self.keys.index_copy_(2, positions, keys)
        self.values.index_copy_(2, positions, values)
        found = functional.scaled_dot_product_attention(
            queries, self.keys, self.values, attn_mask=mask
        )
        result: torch.Tensor = x + self.out(found.transpose(1, 2).flatten(2))
        return result


class CachedDecoder(nn.Module):
    """Logits of the next token, from those given and all before them."""

    def __init__(
        self, *, num_layers: int, width: int, num_heads: int, num_tokens: int, vocab: int = 512
    ) -> None:
        """Make caches for ``num_tokens`` tokens."""
        super().__init__()
        self.num_tokens = num_tokens
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            CachedLayer(width, num_heads, num_tokens) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return (1, tokens, vocab) for tokens (1, tokens) at ``positions`` (tokens)."""
        x = self.embedding(tokens)
        mask = torch.arange(self.num_tokens, device=positions.device) <= positions[:, None]
        for layer in self.layers:
            x = layer(x, positions, mask[None, None])
        result: torch.Tensor = self.head(self.norm(x))
        return result


def build_decoder(
    *, num_layers: int, width: int, num_heads: int, num_tokens: int, vocab: int = 512
) -> CachedDecoder:
    """Return the same decoder each time."""
    torch.manual_seed(0)
    return CachedDecoder(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_tokens=num_tokens,
        vocab=vocab,
    ).eval()


def cache_bytes(decoder: CachedDecoder) -> int:
    """Return the bytes of all keys and values."""
    return sum(buffer.nbytes for buffer in decoder.buffers())
