"""Tests of calls that are known from one like them: what is found of a program is the same without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gascompile.capture.export import capture
from gascompile.core.program import Program
from gascompile.passes.graph.known_calls import KnownCalls, leaves_of
from gascompile.passes.graph.propagate import propagate


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.inner = nn.Linear(size, 3 * size)
        self.norm = nn.BatchNorm1d(size)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(self.norm(x)).split(self.size, dim=-1)
        scores = (q[:, None] * k.t()[None]).amax(1).softmax(-1)
        both = torch.stack([scores[..., : self.size], v], dim=1)
        both[:, 0].add_(x)
        total = torch.cat([both.transpose(1, 2).reshape(len(x), -1), v.expand_as(v)], dim=1)
        out: torch.Tensor = self.drop(
            x + total[:, ::3] * 1 + total[:, : self.size].view_as(x) * 1.0
        )
        return out


def program_of() -> Program:
    model = nn.Sequential(*[Layer(8) for _ in range(4)], nn.Flatten(), nn.Softmax(1)).eval()
    return capture(model, (torch.randn(8, 8),), {}).program


def test_facts_are_the_same_without_known_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of()
    hits = 0
    again = KnownCalls.again

    def counted(self: KnownCalls[object], call: object) -> object:
        nonlocal hits
        found = again(self, call)  # type: ignore[arg-type]
        hits += found is not None
        return found

    monkeypatch.setattr(KnownCalls, "again", counted)
    with_known = propagate(program)
    assert hits > 30
    monkeypatch.setattr(KnownCalls, "again", lambda *_: None)
    without = propagate(program)
    # Of operands that ops keep, layouts are compared.
    assert repr(with_known) == repr(without)


def test_leaves_are_those_of_torchs_trees() -> None:
    value = ([1, (2.0, None)], {"b": "text", "a": [torch.float32]}, ())
    assert leaves_of(value) == torch.utils._pytree.tree_leaves(value)
