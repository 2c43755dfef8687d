"""Captures to interrupt, first calls and what comes of them: torch is as it was; see ``tests.interrupts``."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import nn

import gascompile
from tests.interrupted_steps import Ended
from tests.training.runs import MACHINE

State = tuple[object, ...]


class FirstCall:
    """Compiling a model and calling it, which captures and plans it."""

    found_state: State | None = None

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, itertools.count()
        torch.manual_seed(2)
        self.own = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.LSTM(32, 8)).eval()
        self.x = torch.randn(4, 32)
        with torch.no_grad():
            self.expected = self.own(self.x)

    def act(self) -> None:
        """Compile it where nothing is kept."""
        cache = self.folder / str(next(self.numbers))
        with gascompile.compile(self.own, 1 << 20, machine=MACHINE, cache_dir=cache) as model:
            self.found = model(self.x)

    def check(self) -> None:
        """Compare eager with what it was, and what is compiled now with it."""
        self.found_state = same_state(self.found_state)
        with torch.no_grad():
            torch.testing.assert_close(self.own(self.x), self.expected, rtol=0, atol=0)
        self.act()
        torch.testing.assert_close(self.found, self.expected)


class Shown(Ended):
    """Batches of new kinds, at which a trace looks at the model while a step has its values."""

    found_state: State | None = None

    def begin(self) -> None:
        """Take one step."""
        super().begin()
        self.num_rows = 4

    def made(self) -> nn.Sequential:
        """Return a model that has a tensor by two names, and a view of it."""
        model = super().made()
        first, second = model
        assert isinstance(first, nn.Linear)
        second.weight = first.weight
        model.register_buffer("rows", first.weight.detach()[:4])
        return model

    def act(self) -> None:
        """Evaluate a batch of another size than all before."""
        self.num_rows += 1
        self.step.eval(torch.linspace(-1, 1, self.num_rows * 96).view(-1, 96))

    def check(self) -> None:
        """Read what the step has, and go on with it; close it now and then."""
        self.found_state = same_state(self.found_state)
        self.compare()
        self.step.eval(self.batch)
        self.compare()
        if self.num_rows > 24:
            self.step.close()
            self.compare()
            self.begin()


class FirstStep(Ended):
    """The first step of a model, which captures it, plans and takes its values."""

    found_state: State | None = None

    def __init__(self, folder: Path) -> None:
        self.numbers, self.base = itertools.count(), folder
        super().__init__(folder)
        self.step.close()

    def act(self) -> None:
        """Take it where nothing is kept."""
        self.folder = self.base / str(next(self.numbers))
        self.begin()

    def check(self) -> None:
        """Close what there is, after no step or one, and take another."""
        self.found_state = same_state(self.found_state)
        self.step.close()
        assert all(type(value) is nn.Parameter for value in self.model.parameters())
        self.act()
        self.compare()
        self.step.close()


def same_state(before: State | None) -> State:
    """Return torch's state, which has to be as it was before."""
    found = torch_state()
    assert before is None or found == before
    return found


def torch_state() -> State:
    """Return what traces change for a time, beside the model."""
    assert not torch.ones(2).to("meta").requires_grad
    return (
        torch.is_grad_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._get_mkldnn_enabled(),
        torch.compiler._is_compiling_flag,
        torch.compiler._is_exporting_flag,
        torch.ops.aten.native_batch_norm.default in torch._decomp.decomposition_table,
        hash(frozenset(torch._decomp.decomposition_table.values())),
        sys.getprofile(),
    )


CAPTURES: dict[str, type[FirstCall | Shown | FirstStep]] = {
    "first call": FirstCall,
    "new batches": Shown,
    "first step": FirstStep,
}
