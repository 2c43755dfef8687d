"""Runs to interrupt: ops on both processors at once, and states that move between tiers; see ``tests.interrupts``."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import gascompile
from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.sizes import MIB
from gascompile.core.waiting import own_threads
from tests.integration.site_models import ROWS, WIDTH, Towers, compiled, machine
from tests.training.runs import MACHINE

NUM_LAYERS, NUM_ROWS, STATE_WIDTH = 6, 4096, 64
STATES_BUDGET = 8 * MIB
"""Of 12 MiB of states."""
Values = dict[str, torch.Tensor]


def started(body: threading.Thread) -> threading.Thread:
    """Start a thread: Python's own start() waits on a lock that an interrupt breaks."""
    try:
        # Raises what came just before, with the signal blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        body.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    return body


# ---------------------------------------------------------------- both processors


class Counted(Towers):
    """Towers that count their calls in a state of the accelerator."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1.0)
        joined, right = super().forward(x)
        return joined + self.calls, right


class Sited:
    """Ops on both processors. A call that was interrupted has counted, or has not."""

    most_calls = 3
    """That an act makes at most."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        self.folder, self.own = folder / "cache", Counted().eval()
        self.x = torch.randn(ROWS, WIDTH)
        with torch.no_grad():
            self.joined, self.right = Towers.forward(self.own, self.x)
        self.num_calls = 0.0
        self.begin()

    def begin(self) -> None:
        """Compile it."""
        self.model: gascompile.CompiledModel | None = compiled(
            self.own, self.folder, 1 << 17, machine()
        )
        assert {op.site for op in self.model.plan.ops} == {"gpu", "cpu"}

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Call it."""
        assert self.model is not None
        found: tuple[torch.Tensor, torch.Tensor] = self.model(self.x)
        return found

    def act(self) -> None:
        """Call it."""
        for _ in range(3):
            self.call()

    def check(self) -> None:
        """Compare a call with eager, and another one from another thread."""
        if self.model is None:
            self.begin()
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        self.same(self.most_calls)
        other = threading.Thread(target=self.same)
        other.start()
        other.join()
        assert not own_threads("gascompile-site")

    def same(self, most_calls: int = 0) -> None:
        """Call it and compare, after at most so many calls that nobody has seen the results of."""
        joined, right = self.call()
        assert torch.equal(right, self.right)
        assert self.model is not None
        calls = self.model.states["calls"]
        assert torch.equal(joined, self.joined + calls)
        unseen = float(calls[0]) - self.num_calls - 1
        assert unseen in range(most_calls + 1), (calls, self.num_calls)
        assert torch.equal(calls, torch.full_like(calls, float(calls[0])))
        self.num_calls = float(calls[0])


class SitedShared(Sited):
    """Closing while another thread's call is in flight, and the call that opens it again."""

    most_calls = 4

    def act(self) -> None:
        """Close it and call it beside a thread that calls."""
        other = started(threading.Thread(target=self.calls, daemon=True))
        for _ in range(2):
            assert self.model is not None
            self.model.close()
            self.call()
        other.join()

    def calls(self) -> None:
        """Call it twice."""
        for _ in range(2):
            assert torch.equal(self.call()[1], self.right)

    def check(self) -> None:
        """Compare, once the other thread is done."""
        for thread in threading.enumerate():
            if thread.daemon:
                thread.join()
        super().check()


class SitedDropped(Sited):
    """Dropping it without closing, whatever is in flight, and compiling it again."""

    def act(self) -> None:
        """Call it, drop it and compile it."""
        self.call()
        self.model = None
        gc.collect()
        self.begin()
        self.call()

    def check(self) -> None:
        """Drop what was interrupted, and compile it again."""
        self.model = None
        gc.collect()
        assert not own_threads("gascompile-site")
        super().check()


# ---------------------------------------------------------------- states that move


class Recalling(nn.Module):
    """Layers of two states each: one of which a call writes a row, one to all of which it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(STATE_WIDTH, STATE_WIDTH) for _ in range(NUM_LAYERS))
        for number in range(NUM_LAYERS):
            for name in ("rows", "sums"):
                self.register_buffer(f"{name}_{number}", torch.zeros(NUM_ROWS, STATE_WIDTH))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            rows, sums = self.get_buffer(f"rows_{number}"), self.get_buffer(f"sums_{number}")
            rows.index_copy_(0, row, x)
            sums.add_(x)
            x = torch.tanh(layer(x + rows.mean(0) + sums.mean(0)))
        return x


class Moved:
    """States that leave memory. After an interrupt they are as eager may leave them: any prefix of its writes."""

    where: Machine = MACHINE
    budget = Budget(cpu=STATES_BUDGET)

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(6)
        self.folder = folder / "cache"
        self.own, self.twin = Recalling().eval(), Recalling().eval()
        self.twin.load_state_dict(self.own.state_dict())
        self.inputs = [(torch.randn(1, STATE_WIDTH), torch.tensor([n])) for n in (5, 4095, 5)]
        self.number = 0
        self.begin()
        self.foresee()

    def begin(self) -> None:
        """Compile it."""
        self.model: gascompile.CompiledModel | None = gascompile.compile(
            self.own,
            self.budget,
            self.inputs[0],
            machine=self.where,
            cache_dir=self.folder,
            time_limit_s=3.0,
            fuse="off",
        )

    def call(self, number: int) -> torch.Tensor:
        """Call it."""
        assert self.model is not None
        found: torch.Tensor = self.model(*self.inputs[number])
        return found

    def act(self) -> None:
        """Call it; in between read a state and write one."""
        self.call(0)
        self.call(1)
        float(self.own.get_buffer("sums_2")[7, 7])
        self.own.get_buffer("sums_3").add_(1.0)
        self.call(2)

    def foresee(self) -> None:
        """Write down what an act makes of the states, write by write."""
        self.start = copied(self.twin)
        self.writes: list[tuple[str, torch.Tensor]] = []
        now = dict(self.start)
        for number, values in enumerate(self.twin_acts()):
            names = ["sums_3"] if number == 2 else list(values)
            self.writes += [(name, values[name]) for name in names]
            now.update((name, values[name]) for name in names)
        self.restore(self.start)

    def twin_acts(self) -> Iterator[Values]:
        """Act with eager; yields copies of the states after each call and each write of the caller's."""
        for number in (0, 1, None, 2):
            if number is None:
                self.twin.get_buffer("sums_3").add_(1.0)
            else:
                eager_call(self.twin, self.inputs[number])
            yield copied(self.twin)

    def restore(self, values: Values) -> None:
        """Give the twin these states."""
        for name, value in values.items():
            self.twin.get_buffer(name).copy_(value)

    def prefixes(self) -> Iterator[Values]:
        """Return the states after each number of writes."""
        now = dict(self.start)
        yield dict(now)
        for name, value in self.writes:
            now[name] = value
            yield dict(now)

    def check(self) -> None:
        """Read the states and call it, or call it at once; both are what eager may have left and goes on with."""
        if self.model is None:
            self.begin()
        assert torch.is_grad_enabled()
        self.number += 1
        if self.number % 2:
            found = copied(self.own)
            assert any(same(found, values) for values in self.prefixes()), self.told(found)
            self.restore(found)
            result = self.call(0)
            assert torch.equal(result, eager_call(self.twin, self.inputs[0]))
        else:
            result = self.call(0)
            assert any(self.goes_on(values, result) for values in self.prefixes())
        found = copied(self.own)
        assert same(found, copied(self.twin)), self.told(found)
        self.foresee()

    def goes_on(self, values: Values, result: torch.Tensor) -> bool:
        """Return whether eager has this result, and what a call leaves now, with these states before."""
        self.restore(values)
        return torch.equal(result, eager_call(self.twin, self.inputs[0])) and same(
            copied(self.own), copied(self.twin)
        )

    def told(self, found: Values) -> str:
        """Tell which of its values, by number of writes, each state has."""
        versions = {
            name: [0] * torch.equal(value, self.start[name])
            + [
                n + 1
                for n, (w, wanted) in enumerate(self.writes)
                if w == name and torch.equal(value, wanted)
            ]
            for name, value in found.items()
        }
        return f"{versions}"


class MovedOnDevice(Moved):
    """The same on an emulated accelerator, whose states go to the host's memory."""

    where = machine()
    budget = Budget(gpu=STATES_BUDGET, cpu="96MiB")


class MovedClosed(Moved):
    """Closing, which gives the states back, and the calls that take them again."""

    def act(self) -> None:
        """Close it before each call."""
        assert self.model is not None
        self.call(0)
        self.model.close()
        self.call(1)
        self.own.get_buffer("sums_3").add_(1.0)
        self.model.close()
        self.call(2)

    def check(self) -> None:
        """Compare, and have the states be the model's own in the end, now and then."""
        super().check()
        if self.number % 3 == 0 and self.model is not None:
            self.model.close()
            assert all(type(value) is torch.Tensor for value in self.own.buffers())
            assert same(copied(self.own), copied(self.twin))


class MovedDropped(Moved):
    """Dropping it without closing, which gives the states back, and compiling it again."""

    def act(self) -> None:
        """Drop it and compile it between calls."""
        self.call(0)
        self.call(1)
        self.own.get_buffer("sums_3").add_(1.0)
        self.model = None
        gc.collect()
        self.begin()
        self.call(2)

    def check(self) -> None:
        """Drop what was interrupted: the states are the model's own then."""
        self.model = None
        gc.collect()
        copied(self.own)  # waits for who is giving them back
        assert all(type(value) is torch.Tensor for value in self.own.buffers())
        super().check()


RUNS: dict[str, type[Sited | Moved]] = {
    "sites": Sited,
    "close of sites": SitedShared,
    "drop of sites": SitedDropped,
    "states": Moved,
    "states of a device": MovedOnDevice,
    "close of states": MovedClosed,
    "drop of states": MovedDropped,
}


def copied(model: nn.Module) -> Values:
    """Return copies of a model's states."""
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def same(found: Values, wanted: Values) -> bool:
    """Return whether states are equal bit by bit."""
    return all(torch.equal(found[name], value) for name, value in wanted.items())


def eager_call(model: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return eager's result."""
    with torch.no_grad():
        found: torch.Tensor = model(*inputs)
    return found
