"""Train a GPT of any size on a text inside a memory budget, stop, and go on later.

What does not fit of weights, gradients, optimizer states and activations is moved to the drive and back, as
planned ahead of time.

    python -m examples.train_text --budget 64MiB --steps 200 --save /tmp/run
    python -m examples.train_text --budget 64MiB --steps 400 --resume /tmp/run
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import gascompile
from examples.small_gpt import SmallGPT, batch_at, next_byte_loss, read_text
from gascompile.commands.output import emit, fields, report_error, reserved_stdout
from gascompile.core.sizes import format_size, format_time, parse_size
from gascompile.training.monitor import Monitor
from gascompile.training.timeline import record
from gascompile.training.units import UnitMaker

TOLERANCE = 1e-4
_WARMUP_STEPS = 20
_HELD_OUT = 10
"""One part in so many of the text is kept for measuring."""
_EVAL_BATCHES = 4
_RECORDED = 3
"""Steps before the one whose timeline is drawn; the first brings tensors to their places."""
_NO_TEXT = "the language reference that comes with Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is trained; a resumed run takes from the saved one what is not given anew."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    tokens: int = 128
    batch: int = 8
    lr: float = 1e-3
    seed: int = 0
    text: str = ""
    """A file; empty for the text that comes with Python."""

    def texts(self) -> tuple[bytes, bytes]:
        """Return what is trained on, and what is kept aside for measuring.

        Raises:
            FileNotFoundError: there is no such text.
        """
        text = read_text(Path(self.text) if self.text else None)
        cut = len(text) - len(text) // _HELD_OUT
        return text[:cut], text[cut:]

    def model(self) -> SmallGPT:
        """Return the model with the weights that training begins with."""
        torch.manual_seed(self.seed)
        return SmallGPT(
            layers=self.layers, width=self.width, heads=self.heads, tokens=self.tokens
        ).train()

    def batch_of(self, text: bytes, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of a step."""
        return batch_at(text, number, batch=self.batch, tokens=self.tokens)

    def lr_at(self, number: int) -> float:
        """Return the learning rate of a step: it rises to ``lr``, then stays."""
        return self.lr * min(1.0, (number + 1) / _WARMUP_STEPS)


@dataclass(slots=True)
class Progress:
    """What training showed."""

    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    """Loss on the text that is kept aside, by number of steps."""
    peak_bytes: int = 0
    link_bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    num_steps: int = 0
    """Steps of this run, without those of the run that it continues."""

    def add(self, loss: float, run: gascompile.RunReport) -> None:
        """Take a step in."""
        self.losses.append(loss)
        self.num_steps += 1
        self.seconds += run.seconds
        self.peak_bytes = max(self.peak_bytes, *run.peak_bytes.values())
        for link, size_bytes in run.link_bytes.items():
            self.link_bytes[link] = self.link_bytes.get(link, 0) + size_bytes


class Folder:
    """A run on the drive: its settings, and its last checkpoint with the losses up to there."""

    def __init__(self, path: Path) -> None:
        self._checkpoints = path / "checkpoints"
        self._settings = path / "settings.json"

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self._settings.exists()

    def begin(self, settings: Settings) -> None:
        """Make the folder and write the settings."""
        self._settings.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(settings)) + "\n"
        self._settings.write_text(text, encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """Return the settings as they were saved.

        Raises:
            FileNotFoundError: nothing was saved here.
        ValueError: the file is damaged.
        """
        try:
            found: dict[str, Any] = json.loads(self._settings.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self._settings} is damaged: {error}; take it from a backup"
            ) from error
        return found

    def save(self, step: gascompile.TrainingStep, losses: list[float]) -> None:
        """Write a checkpoint in place of the one before."""
        step.save(self._checkpoints, extra={"losses": losses})

    def load(self, step: gascompile.TrainingStep) -> list[float]:
        """Take the last checkpoint up and return the losses of the steps behind it."""
        losses: list[float] = step.load(self._checkpoints)["losses"]
        return losses


def held_out_loss(step: gascompile.TrainingStep, settings: Settings, text: bytes) -> float:
    """Return the mean loss of a few batches of text that is not trained on."""
    losses = [
        float(step.eval(settings.batch_of(text, -1 - number))) for number in range(_EVAL_BATCHES)
    ]
    return sum(losses) / len(losses)


def train(options: argparse.Namespace, settings: Settings, folder: Folder | None) -> dict[str, Any]:
    """Train up to the step that is asked for; return everything there is to report."""
    training, held_out = settings.texts()
    model, progress = settings.model(), Progress()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    with gascompile.compile_step(
        model,
        next_byte_loss,
        optimizer,
        options.budget,
        example_batch=settings.batch_of(training, 0),
        cache_dir=options.cache_dir,
    ) as step:
        if options.resume is not None and folder is not None:
            progress.losses = folder.load(step)
        elif folder is not None:
            folder.begin(settings)
        first = len(progress.losses)
        # Planned here, where its own progress bar is not in the way of the line.
        progress.held_out[first] = held_out_loss(step, settings, held_out)
        every = max(1, (options.steps - first) // 10)
        with Monitor(step, log_dir=options.logs, every=every) as monitor:
            for number in range(first, options.steps):
                optimizer.param_groups[0]["lr"] = settings.lr_at(number)
                batch = settings.batch_of(training, number)
                if options.timeline is not None and number == recorded_step(first, options):
                    found = record(step, batch)
                    found.save(options.timeline)
                    loss = found.loss
                else:
                    loss = step(batch)
                assert step.last_run is not None
                progress.add(float(loss), step.last_run)
                monitor(loss)
                done = number + 1
                if done % options.every == 0 or done == options.steps:
                    progress.held_out[done] = held_out_loss(step, settings, held_out)
                    if folder is not None:
                        folder.save(step, progress.losses)
    return {
        "settings": dataclasses.asdict(settings),
        "num_weights": num_weights,
        "first_step": first,
        "budget_bytes": options.budget,
        **dataclasses.asdict(progress),
    }


def recorded_step(first: int, options: argparse.Namespace) -> int:
    """Return the step whose timeline is drawn: one in the middle of others, where there are enough."""
    last: int = options.steps - 1
    return min(first + _RECORDED, last)


def eager_losses(settings: Settings, steps: int) -> list[float]:
    """Return the losses of the same training with everything in memory."""
    training, _ = settings.texts()
    model, losses = settings.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = settings.lr_at(number)
        optimizer.zero_grad()
        loss = next_byte_loss(model, settings.batch_of(training, number))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw the loss curve as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(found["losses"]) + 1)
    axes.plot(steps, found["losses"], label="training text", linewidth=1)
    axes.plot(
        list(found["held_out"]), list(found["held_out"].values()), "o-", label="held-out text"
    )
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.set_title(
        f"{found['num_weights'] / 1e6:.1f} M weights in {format_size(found['budget_bytes'])}"
    )
    axes.legend()
    figure.savefig(path)


def failures(found: dict[str, Any]) -> list[str]:
    """Return what a correct run must not show."""
    wrong = []
    if found["peak_bytes"] > found["budget_bytes"]:
        wrong.append(
            f"the peak of {found['peak_bytes']} bytes is above the budget of {found['budget_bytes']}"
        )
    difference = found.get("max_difference", 0.0)
    if not difference <= TOLERANCE:
        wrong.append(f"a loss differs from eager's by {difference:.3g}, more than {TOLERANCE}")
    return wrong


def report(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows for people."""
    num_steps = max(found["num_steps"], 1)
    moved = "".join(
        f", {link} {format_size(size_bytes / num_steps)}"
        for link, size_bytes in sorted(found["link_bytes"].items())
    )
    rows = [
        ("weights", f"{found['num_weights']:,}"),
        ("steps", f"{found['first_step']} to {found['first_step'] + found['num_steps']}"),
    ]
    if found["num_steps"]:
        peak = f"{format_size(found['peak_bytes'])} of {format_size(found['budget_bytes'])}"
        rows += [
            ("peak", f"{peak}, beside {format_size(UnitMaker.transfer_bytes)} for transfers"),
            ("per step", f"{format_time(found['seconds'] / num_steps)}{moved}"),
        ]
    if found["losses"]:
        rows.append(("loss", f"{found['losses'][0]:.4f} to {found['losses'][-1]:.4f}"))
    if found["held_out"]:
        rows.append(("held-out text", f"{list(found['held_out'].values())[-1]:.4f}"))
    if "max_difference" in found:
        rows.append(("difference", f"{found['max_difference']:.1e} at most from eager's losses"))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples.train_text", description="Train a GPT on a text inside a memory budget."
    )
    for setting in dataclasses.fields(Settings):
        default = _NO_TEXT if setting.name == "text" else setting.default
        parser.add_argument(
            f"--{setting.name}",
            type=type(setting.default),
            help=f"default: {default}, or as in the run that is resumed",
        )
    parser.add_argument("--budget", default="96MiB", help="memory (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="last step (default: %(default)s)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--save", type=Path, metavar="DIR", help="begin a run that can be resumed")
    where.add_argument("--resume", type=Path, metavar="DIR", help="go on with a saved run")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss curve (PNG)")
    parser.add_argument(
        "--timeline", type=Path, metavar="DIR", help="record a step: trace file and picture"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="scalars for TensorBoard")
    parser.add_argument("--compare", action="store_true", help="train without a budget as well")
    parser.add_argument("--cache-dir", help="where the machine's profile and moved bytes go")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _checked(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Settings, Folder | None]:
    """Return options that make sense together; ends the process with 2 otherwise."""
    parser = _parser()
    options = parser.parse_args(argv)
    names = [setting.name for setting in dataclasses.fields(Settings)]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.text is not None:
        given["text"] = str(Path(options.text).resolve())
    path = options.save or options.resume
    folder = Folder(path) if path is not None else None
    if options.compare and options.resume is not None:
        parser.error("--compare trains from the first step; it cannot be used with --resume")
    if options.every < 1 or options.steps < 1:
        parser.error("--every and --steps take 1 or more")
    try:
        options.budget = parse_size(options.budget)
        if options.resume is not None and folder is not None:
            given = {**folder.settings(), **given}
        settings = Settings(**given)
        for text in settings.texts():
            settings.batch_of(text, 0)
        if settings.width % settings.heads:
            parser.error(f"--width {settings.width} is no multiple of --heads {settings.heads}")
    except FileNotFoundError as error:
        parser.error(f"{error.filename}: there is no such file")
    except ValueError as error:
        parser.error(str(error))
    if options.save is not None and folder is not None and folder.exists:
        parser.error(
            f"{options.save} has a run; go on with it by --resume, or choose another folder"
        )
    return options, settings, folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 when the peak and, where compared, the losses are right."""
    options, settings, folder = _checked(argv)
    try:
        with reserved_stdout(options.json):
            found = train(options, settings, folder)
    except gascompile.GASCompileError as error:
        report_error(error, as_json=options.json)
        return 1
    if options.compare:
        expected = eager_losses(settings, options.steps)
        differences = [abs(a - b) for a, b in zip(found["losses"], expected, strict=True)]
        found["max_difference"] = max(differences)
    if options.plot is not None:
        plot(found, options.plot)
    if found["num_steps"] == 0:
        sys.stderr.write(
            f"nothing was left to do: the run has {found['first_step']} steps already; ask for more by --steps\n"
        )
    wrong = failures(found)
    emit(options.json, {**found, "failures": wrong}, fields("Training", report(found)))
    for problem in wrong:
        sys.stderr.write(f"failed: {problem}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
