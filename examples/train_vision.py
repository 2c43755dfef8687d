"""Train a small convolutional network on handwritten digits inside a memory budget.

Batch normalisation keeps running means, dropout draws random numbers and a scheduler lowers the learning rate:
the compiled step does with them what PyTorch does.

    python -m examples.train_vision --budget 10MiB --epochs 5
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

import gascompile
from gascompile.commands.output import emit, fields, report_error, reserved_stdout
from gascompile.core.sizes import format_size, format_time, parse_size

Batch = tuple[torch.Tensor, torch.Tensor]
PACKAGE = "scikit-learn"
_NUM_TESTED = 360
_SIDE = 8


class Block(nn.Module):
    """A convolution with batch normalisation, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.normalise = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, width, 8, 8]`` to the same."""
        return x + functional.relu(self.normalise(self.convolve(x)))


class DigitNet(nn.Module):
    """Convolutions with batch normalisation, dropout and a linear layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *(Block(width) for _ in range(layers)),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(
            nn.Dropout(0.25), nn.Flatten(), nn.Linear(width * (_SIDE // 2) ** 2, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 1, 8, 8]`` to logits ``[batch, 10]``."""
        logits: torch.Tensor = self.classify(self.features(images))
        return logits


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross entropy while training, and the number of right answers while evaluating."""
    images, labels = batch
    logits: torch.Tensor = model(images)
    if model.training:
        return functional.cross_entropy(logits, labels)
    return (logits.argmax(dim=1) == labels).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images ``[n, 1, 8, 8]`` from 0 to 1 and their digits, to train on and to test with."""

    training: Batch
    testing: Batch

    def batches(self, size: int, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, in an order of its own; what fills no batch is left out."""
        images, labels = self.training
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for part in order.split(size):
            if len(part) == size:
                yield images[part], labels[part]


def load_digits() -> Digits:
    """Return the digits that come with scikit-learn."""
    from sklearn import datasets

    found = datasets.load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:_NUM_TESTED], order[_NUM_TESTED:]
    return Digits(training=(images[train], labels[train]), testing=(images[test], labels[test]))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train and test; return everything there is to report."""
    digits, console = load_digits(), Console(stderr=True)
    torch.manual_seed(options.seed)
    model = DigitNet(options.width, options.layers).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    peak_bytes, link_bytes, losses, accuracies = 0, dict[str, int](), [], []
    begin_s = time.perf_counter()
    with gascompile.compile_step(
        model,
        loss_fn,
        optimizer,
        options.budget,
        example_batch=next(digits.batches(options.batch, 0)),
        cache_dir=options.cache_dir,
    ) as step:
        for epoch in range(options.epochs):
            epoch_losses = []
            for batch in digits.batches(options.batch, epoch):
                epoch_losses.append(float(step(batch)))
                report = step.last_run
                assert report is not None
                peak_bytes = max(peak_bytes, *report.peak_bytes.values())
                for link, size_bytes in report.link_bytes.items():
                    link_bytes[link] = link_bytes.get(link, 0) + size_bytes
            scheduler.step()
            losses.append(sum(epoch_losses) / len(epoch_losses))
            accuracies.append(tested(step, digits.testing, options.batch))
            console.print(
                f"epoch {epoch + 1}  loss {losses[-1]:.4f}  accuracy {accuracies[-1]:.1%}",
                highlight=False,
            )
    return {
        "budget_bytes": options.budget,
        "peak_bytes": peak_bytes,
        "link_bytes": link_bytes,
        "losses": losses,
        "accuracies": accuracies,
        "seconds": time.perf_counter() - begin_s,
    }


def tested(step: gascompile.TrainingStep, testing: Batch, size: int) -> float:
    """Return the share of test images that the model knows."""
    images, labels = testing
    right = sum(
        int(step.eval((part, known)))
        for part, known in zip(images.split(size), labels.split(size), strict=True)
    )
    return right / len(labels)


def failures(found: dict[str, Any]) -> list[str]:
    """Return what a correct run must not show."""
    wrong = []
    if found["peak_bytes"] > found["budget_bytes"]:
        wrong.append(
            f"the peak of {found['peak_bytes']} bytes is above the budget of {found['budget_bytes']}"
        )
    # A tenth is what guessing reaches.
    if not found["accuracies"][-1] > 0.5:
        wrong.append(f"an accuracy of {found['accuracies'][-1]:.1%} is little more than guessing")
    return wrong


def report_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows for people."""
    moved = ", ".join(f"{link} {format_size(n)}" for link, n in sorted(found["link_bytes"].items()))
    return [
        ("accuracy", f"{found['accuracies'][-1]:.1%} of {_NUM_TESTED} images it was not shown"),
        ("loss", f"{found['losses'][0]:.4f} to {found['losses'][-1]:.4f}"),
        ("peak", f"{format_size(found['peak_bytes'])} of {format_size(found['budget_bytes'])}"),
        ("moved", moved or "nothing"),
        ("time", format_time(found["seconds"])),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 when the peak is right and something was learned."""
    parser = argparse.ArgumentParser(
        prog="examples.train_vision", description="Train on digits inside a memory budget."
    )
    parser.add_argument("--budget", default="10MiB", help="memory (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=60, help="images (default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, help="channels (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=0.003, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--cache-dir", help="where the machine's profile and moved bytes go")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(argv)
    if min(options.epochs, options.batch, options.width, options.layers) < 1:
        parser.error("--epochs, --batch, --width and --layers take 1 or more")
    try:
        options.budget = parse_size(options.budget)
    except ValueError as error:
        parser.error(str(error))
    if find_spec("sklearn") is None:
        sys.stderr.write(f"the digits are missing; install them with: pip install {PACKAGE}\n")
        return 1
    try:
        with reserved_stdout(options.json):
            found = run(options)
    except gascompile.GASCompileError as error:
        report_error(error, as_json=options.json)
        return 1
    wrong = failures(found)
    emit(options.json, {**found, "failures": wrong}, fields("Training", report_rows(found)))
    for text in wrong:
        sys.stderr.write(f"failed: {text}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
