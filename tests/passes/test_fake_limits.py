"""Runs on fake tensors end where an op would be made of too many pieces, before they are made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gascompile.capture.export import capture
from gascompile.core.errors import UnsupportedOpError
from gascompile.passes.graph.propagate import propagate


class Pieces(nn.Module):
    """Takes a row of a view that has many."""

    def __init__(self, num_pieces: int, name: str) -> None:
        super().__init__()
        self.num_pieces = num_pieces
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        many = x.expand(self.num_pieces, 2)
        found: torch.Tensor = many.unbind()[0] if self.name == "unbind" else many.split(1)[0]
        return found + 1


@pytest.mark.parametrize("name", ["unbind", "split"])
def test_too_many_pieces(name: str) -> None:
    program = capture(Pieces(3, name), (torch.ones(2),), {}).program
    assert propagate(program).ops
    (expand,) = (n for n in program.op_nodes() if "expand" in n.name)
    expand.args = (expand.args[0], [1 << 40, 2])
    with pytest.raises(UnsupportedOpError, match="pieces, more than 65536"):
        propagate(program)
