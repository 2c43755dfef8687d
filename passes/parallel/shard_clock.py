"""Shard clock: how long a training step takes by the clock of all other plans, one rank standing for all.

Layers go forward in order and backward in reverse. What a layer needs is asked for two layers ahead; what it leaves is
sent off when it has been computed, and the layer after the next one waits for it, as its buffer in the GPU is needed.
What drives bring or take has two buffers in RAM, for layers that lie further apart. A step ends when everything has
arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

from gascompile.cost_models.simulate.events import (
    COMPUTE,
    PREFETCH,
    WAIT,
    Event,
    EventProgram,
    steady_seconds,
)
from gascompile.passes.parallel.shard_options import (
    BACKWARD,
    FORWARD,
    LANES,
    LEFT,
    NEEDED,
    Option,
)

AHEAD = 2
"""Layers that are asked for early, and whose buffers are counted. [Empirical] Of 405B on 1,024 ranks one exposes 0.3 %
of the step, two 0.1 %, four no less."""


def interleaved(counted: Sequence[tuple[Option, int]]) -> list[Option]:
    """Return every layer's option, as evenly mixed as their counts allow, so that no lane waits for another's turn."""
    total = sum(count for _, count in counted)
    done = [0] * len(counted)
    layers = []
    for at in range(1, total + 1):
        lags = [count * at / total - done[i] for i, (_, count) in enumerate(counted)]
        chosen = lags.index(max(lags))
        done[chosen] += 1
        layers.append(counted[chosen][0])
    return layers


def step_seconds(layers: Sequence[Option], head: Option) -> float:
    """Return the seconds of a step whose layers are treated as ``layers`` says, in order, and the rest as ``head``."""
    program = _Program()
    phases = [[(option, FORWARD) for option in (head, *layers)]]
    phases.append([(option, BACKWARD) for option in (*reversed(layers), head)])
    every = [copies for phase in phases for copies in program.run_phase(phase)]
    for late in every:
        program.wait(late)
    return program.seconds()


class _Program:
    """Events over copies, one per lane and pass of a layer."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.link_of: list[int] = []
        self._seconds: list[float] = []

    def run_phase(self, layers: Sequence[tuple[Option, int]]) -> list[list[int]]:
        """Go through the layers of one phase; return what each leaves. What it reads, the phase before has written."""
        needs = [self.copies(option, phase, NEEDED) for option, phase in layers]
        leaves = [self.copies(option, phase, LEFT) for option, phase in layers]
        reads = [copy for copies in needs for copy in copies if self.is_drive(copy)]
        written: list[int] = []
        for early in needs[:AHEAD]:
            self.issue([copy for copy in early if not self.is_drive(copy)])
        self.issue(reads[:AHEAD])
        asked = AHEAD
        for i, (option, phase) in enumerate(layers):
            if i + AHEAD < len(layers):
                self.issue([copy for copy in needs[i + AHEAD] if not self.is_drive(copy)])
            self.wait(needs[i])
            self.events.append((COMPUTE, 0, option.compute_s[phase]))
            used = sum(self.is_drive(copy) for copy in needs[i])
            self.issue(reads[asked : asked + used])
            asked += used
            written += [copy for copy in leaves[i] if self.is_drive(copy)]
            self.issue(leaves[i])
            self.wait(written[: max(0, len(written) - AHEAD)][-1:])
            if i >= AHEAD:
                self.wait([copy for copy in leaves[i - AHEAD] if not self.is_drive(copy)])
        return leaves

    def copies(self, option: Option, phase: int, side: int) -> list[int]:
        """Return the numbers of the copies that a pass of a layer needs, or that it leaves."""
        numbers = []
        for lane, loads in option.loads_s.items():
            seconds = loads[2 * phase + side]
            if seconds > 0:
                numbers.append(len(self.link_of))
                self.link_of.append(LANES.index(lane))
                self._seconds.append(seconds)
        return numbers

    def is_drive(self, copy: int) -> bool:
        """Return whether a copy has its buffer in RAM, so that layers of the GPU need not wait for it."""
        return LANES[self.link_of[copy]].startswith("drive")

    def issue(self, copies: Sequence[int]) -> None:
        """Ask for copies."""
        self.events += [(PREFETCH, copy, self._seconds[copy]) for copy in copies]

    def wait(self, copies: Sequence[int]) -> None:
        """Let compute wait for copies."""
        self.events += [(WAIT, copy, 0.0) for copy in copies]

    def seconds(self) -> float:
        """Return when the last event ends; a step starts with nothing under way."""
        pipes = [()] * len(self.link_of)
        return steady_seconds(EventProgram(self.events, self.link_of, pipes, False, len(LANES), 0))
