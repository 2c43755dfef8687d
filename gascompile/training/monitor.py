"""What a run does, while it does it: one live line on a terminal, and scalars for TensorBoard.

The writer is an argument, such as ``torch.utils.tensorboard.SummaryWriter``, so nothing depends on it here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

import torch

from gascompile.training.step import TrainingStep
from gascompile.units import format_size, format_time

if TYPE_CHECKING:
    from rich.live import Live


class ScalarWriter(Protocol):
    """What takes scalars."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Keep a value of a step."""


class Monitor:
    """Call it with each loss: ``with Monitor(step) as monitor: ... monitor(step(batch))``."""

    def __init__(
        self,
        step: TrainingStep,
        *,
        writer: ScalarWriter | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Watch a step.

        Args:
            step: what is trained with.
            writer: gets ``train/...`` scalars of each step; closing it is the caller's.
            stream: where the line is shown, if it is a terminal; standard error by default.
        """
        self._step, self._writer = step, writer
        self._stream = stream or sys.stderr
        self._live: Live | None = None

    def __call__(self, loss: torch.Tensor) -> None:
        """Show and keep what the last step has measured.

        Raises:
            ValueError: no step has run.
        """
        found = self.scalars(loss)
        if self._writer is not None:
            for name, value in found.items():
                self._writer.add_scalar(f"train/{name}", value, self._step.num_steps)
        if self._live is not None:
            from rich.text import Text

            shown = line(self._step.num_steps, found)
            self._live.update(Text(shown, no_wrap=True, overflow="ellipsis"))

    def scalars(self, loss: torch.Tensor) -> dict[str, float]:
        """Return what is kept of the last step, in seconds and bytes."""
        run = self._step.last_run
        if run is None:
            raise ValueError("no step has run yet; call step(batch) first")
        found = {"loss": float(loss), "time_s": run.seconds, "stall_s": run.stall_s}
        found |= {f"peak_bytes/{tier}": float(size) for tier, size in run.peak_bytes.items()}
        found |= {f"moved_bytes/{link}": float(size) for link, size in run.link_bytes.items()}
        for number, group in enumerate(self._step.optimizer.param_groups):
            found[f"lr/{number}"] = float(group["lr"])
        return found

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def line(number: int, scalars: Mapping[str, float]) -> str:
    """Return one line for people."""
    time_s = scalars["time_s"]
    parts = [
        f"step {number}",
        f"loss {scalars['loss']:.4f}",
        f"{format_time(time_s)} a step",
        f"waiting {scalars['stall_s'] / time_s:.0%}",
    ]
    for name, value in scalars.items():
        kind, _, where = name.partition("/")
        if kind == "peak_bytes":
            parts.append(f"{where} {format_size(value)}")
        elif kind == "moved_bytes" and value:
            parts.append(f"{where} {format_size(value / time_s)}/s")
    return "  ".join(parts)
