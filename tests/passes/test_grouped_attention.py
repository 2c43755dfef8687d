"""Keys and values that are repeated for groups of queries are read where they are, bit for bit the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gascompile.capture.export import capture
from gascompile.core.program import Program
from gascompile.passes.graph.grouped_attention import grouped_attention

attention = nn.functional.scaled_dot_product_attention


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Return every head so many times, as models of transformers do."""
    rows, heads, tokens, width = x.shape
    x = x[:, :, None].expand(rows, heads, times, tokens, width)
    return x.reshape(rows, heads * times, tokens, width)


class Grouped(nn.Module):
    """Attention of queries to a part of keys and values, of fewer heads."""

    def __init__(self, repeat: Any = repeated, **options: Any) -> None:
        super().__init__()
        self.repeat, self.options = repeat, options

    def forward(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention over the positions that the mask is for."""
        times, seen = query.shape[1] // keys.shape[1], mask.shape[-1]
        keys, values = (self.repeat(x.narrow(2, 0, seen), times) for x in (keys, values))
        options: dict[str, Any] = {"attn_mask": mask, "scale": 0.3} | self.options
        return attention(query, keys, values, **options)


def made(dtype: torch.dtype, tokens: int = 3, rows: int = 2) -> tuple[torch.Tensor, ...]:
    query = torch.randn(rows, tokens, 6, 8, dtype=dtype).transpose(1, 2)
    keys, values = torch.randn(2, rows, 2, 70, 8, dtype=dtype)
    mask = torch.rand(rows, 1, tokens, 69) > 0.4
    mask[..., 0] = True
    return query, keys, values, mask


def both(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any
) -> tuple[Program, Program]:
    names = ("query", "keys", "values", "mask")
    before = capture(model, (), dict(zip(names, inputs, strict=True)), **options).program
    return before, grouped_attention(before)


def num_ops(program: Program) -> int:
    return sum(node.op == "call_function" for node in program.graph_module.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_same_bits_without_copies(dtype: torch.dtype, tokens: int) -> None:
    model, inputs = Grouped(), made(dtype, tokens)
    before, after = both(model, inputs)
    assert num_ops(before) - num_ops(after) == 2 * len(["unsqueeze", "expand", "reshape"])
    (found,) = after.graph_module(*inputs)
    wanted = model(*inputs)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


def test_sizes_that_are_open() -> None:
    model, inputs = Grouped(), made(torch.float32)
    past = torch.export.Dim("past", min=4, max=69)
    shapes = {"query": None, "keys": None, "values": None, "mask": {3: past}}
    before, after = both(model, inputs, dynamic_shapes=shapes)
    assert num_ops(after) < num_ops(before)
    query, keys, values, mask = made(torch.float32)
    shorter = (query, keys, values, mask[..., :30])
    assert torch.equal(after.graph_module(*shorter)[0], model(*shorter))


def in_turns(x: torch.Tensor, times: int) -> torch.Tensor:
    """Return all heads one after the other, again and again."""
    rows, heads, tokens, width = x.shape
    x = x[:, None].expand(rows, times, heads, tokens, width)
    return x.reshape(rows, heads * times, tokens, width)


@pytest.mark.parametrize(
    "model",
    [
        Grouped(in_turns),
        Grouped(lambda x, times: x.repeat_interleave(times, 1)),
        Grouped(dropout_p=0.5),
        Grouped(lambda x, times: repeated(x[..., :4], times).repeat(1, 1, 1, 2)),
    ],
    ids=["in turns", "another op", "dropout", "other widths"],
)
def test_what_is_another_repetition_stays(model: nn.Module) -> None:
    before, after = both(model, made(torch.float32))
    assert after is before


def test_keys_alone_stay_repeated() -> None:
    class KeysAlone(nn.Module):
        def forward(self, query: Any, keys: Any, values: Any, mask: Any) -> Any:
            values = values.repeat_interleave(3, 1)[:, :, :-1]
            return attention(query, repeated(keys[:, :, :-1], 3), values, mask)

    before, after = both(KeysAlone(), made(torch.float32))
    assert after is before


def test_what_is_written_to_after_the_copy_stays_repeated() -> None:
    class Later(nn.Module):
        def forward(self, query: Any, keys: Any, values: Any, mask: Any) -> Any:
            copies = repeated(keys[:, :, :-1], 3), repeated(values[:, :, :-1], 3)
            keys.zero_()
            return attention(query, *copies, mask)

    inputs = made(torch.float32)
    _, after = both(Later(), inputs)
    wanted = Later()(*(x.clone() for x in inputs))
    assert torch.equal(after.graph_module(*inputs)[-1], wanted)
