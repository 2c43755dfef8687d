"""What a run does, while it does it: one live line on a terminal, and scalars for TensorBoard.

TensorBoard is loaded where a folder for its files is given; another writer of scalars can stand in for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol, Self, TextIO

import torch

from gascompile.core.errors import GASCompileError
from gascompile.core.sizes import format_size, format_time
from gascompile.training.step import TrainingStep

if TYPE_CHECKING:
    from rich.live import Live
    from torch.utils.tensorboard import SummaryWriter


class ScalarWriter(Protocol):
    """What takes scalars."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Keep a value of a step."""


class Monitor:
    """Call it with each loss: ``with Monitor(step) as monitor: ... monitor(step(batch))``.

    Of several ranks the first shows and keeps what all have measured, of each rank that of the step before; on others
    it does nothing. Ranks exchange no more for it.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        writer: ScalarWriter | None = None,
        stream: TextIO | None = None,
        every: int = 0,
    ) -> None:
        """Watch a step.

        Args:
            step: what is trained with.
            log_dir: folder for TensorBoard's files, which get ``train/...`` scalars of each step.
            writer: gets the same; closing it is the caller's.
            stream: where the line is shown, if it is a terminal; standard error by default.
            every: steps from one line to the next where the stream is no terminal; none by default.

        Raises:
            GASCompileError: ``log_dir`` is given and TensorBoard is not installed.
        """
        self._step = step
        # Of several ranks the first shows what all have told it.
        self._is_shown = step.ranks is None or step.ranks.rank == 0
        self._own = None if log_dir is None or not self._is_shown else _tensorboard(log_dir)
        self._writers = [w for w in (writer, self._own) if w is not None and self._is_shown]
        self._stream, self._every = stream or sys.stderr, every
        self._live: Live | None = None
        self._num_seen = 0

    def __call__(self, loss: torch.Tensor) -> None:
        """Show and keep what the last step has measured.

        Raises:
            ValueError: no step has run.
        """
        scalars = self.scalars(loss)
        self._num_seen += 1
        for writer in self._writers:
            for name, value in scalars.items():
                writer.add_scalar(f"train/{name}", value, self._step.num_steps)
        shown = line(self._step.num_steps, scalars)
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(shown, no_wrap=True, overflow="ellipsis"))
        elif self._is_shown and self._every and self._num_seen % self._every == 0:
            self._stream.write(shown + "\n")

    def scalars(self, loss: torch.Tensor) -> dict[str, float]:
        """Return what is kept of the last step, in seconds and bytes."""
        run = self._step.last_run
        if run is None:
            raise ValueError("no step has run yet; call step(batch) first")
        scalars = {"loss": float(loss), "time_s": run.seconds, "stall_s": run.stall_s}
        scalars["share_of_limit"] = run.share_of_limit
        scalars |= {f"peak_bytes/{tier}": float(size) for tier, size in run.peak_bytes.items()}
        scalars |= {f"moved_bytes/{link}": float(size) for link, size in run.link_bytes.items()}
        for number, group in enumerate(self._step.optimizer.param_groups):
            scalars[f"lr/{number}"] = float(group["lr"])
        for rank, of_rank in enumerate(
            self._step.ranks.runs if self._step.ranks is not None else ()
        ):
            told = asdict(of_rank)
            scalars |= {f"ranks/{rank}/{name}": float(value) for name, value in told.items()}
        return scalars

    def __enter__(self) -> Self:
        if self._is_shown and self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._own is not None:
            self._own.flush()


def _tensorboard(folder: str | os.PathLike[str]) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise GASCompileError(
            "scalars for TensorBoard need its package; install it with: pip install tensorboard"
        ) from error
    return SummaryWriter(folder)


def line(number: int, scalars: Mapping[str, float]) -> str:
    """Return one line for people."""
    time_s = scalars["time_s"]
    parts = [
        f"step {number}",
        f"loss {scalars['loss']:.4f}",
        f"{format_time(time_s)} a step",
        f"{scalars['share_of_limit']:.0%} of the limit",
        f"waiting {scalars['stall_s'] / time_s:.0%}",
    ]
    for name, value in scalars.items():
        kind, _, where = name.partition("/")
        if kind == "peak_bytes":
            parts.append(f"{where} {format_size(value)}")
        elif kind == "moved_bytes" and value:
            parts.append(f"{where} {format_size(value / time_s)}/s")
    return "  ".join([*parts, *_of_ranks(scalars)])


def _of_ranks(scalars: Mapping[str, float]) -> list[str]:
    """Return what each rank has told, in words."""
    told: dict[str, dict[str, float]] = {}
    for name, value in scalars.items():
        if name.startswith("ranks/"):
            _, rank, what = name.split("/")
            told.setdefault(rank, {})[what] = value
    return [
        f"rank {rank}: {run['rows']:.0f} rows {format_time(run['time_s'])}, waiting {format_time(run['waited_s'])}, "
        f"{format_size(run['peak_bytes'])}"
        for rank, run in told.items()
    ]
