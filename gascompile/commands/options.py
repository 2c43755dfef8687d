"""Options that verbs share, and what they mean."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from gascompile.core.budget import Budget
from gascompile.core.config import CACHE_VARIABLE, default_cache_dir
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import is_file, is_folder
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.serial import read_json, reads
from gascompile.core.sizes import parse_size


def size(text: str) -> int:
    """Read a size option; raises ``typer.BadParameter`` with the units that are known."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


_AGE_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def age(text: str) -> float:
    """Read an age in seconds from ``30d``, ``12h``, ``45m`` or ``2w``."""
    unit_s = _AGE_UNITS_S.get(text[-1:].lower())
    try:
        number = float(text[:-1])
    except ValueError:
        number = -1.0
    if unit_s is None or not 0 <= number < math.inf:
        raise typer.BadParameter(f"cannot read the age {text!r}: write 30d, 12h, 45m or 2w")
    return number * unit_s


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
BudgetSize = Annotated[
    int | None,
    typer.Option(
        "--budget",
        "-b",
        parser=size,
        metavar="SIZE",
        help="Memory of the tier that computes: 8GiB.",
    ),
]
CpuSize = Annotated[
    int | None,
    typer.Option("--cpu", parser=size, metavar="SIZE", help="CPU memory the plan may use."),
]
NvmeSize = Annotated[
    int | None,
    typer.Option("--nvme", parser=size, metavar="SIZE", help="NVMe space the plan may use."),
]
PlaceSizes = Annotated[
    list[str] | None,
    typer.Option(
        "--place",
        metavar="NAME=SIZE",
        help="What the plan may use of any place of the machine: h0.nvme1=1TB. May stand several times.",
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        "-m",
        metavar="NAME|FILE",
        help="A preset or a machine file; by default this machine.",
    ),
]
OtherMachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        "-m",
        metavar="NAME|FILE",
        help="A preset or a machine file for the links; ops keep the plan's times. By default the plan's machine.",
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help=f"Plans, spilled weights, machine profile; ${CACHE_VARIABLE}.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option("--strategy", metavar="NAME", help="Force one candidate, such as first_fit."),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit", min=0.01, max=1e6, metavar="SECONDS", help="Wall clock for the solver."
    ),
]
WeightForm = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FORM",
        help="Form that weights move in: bf16, int8, int4 or auto; by default as they are stored.",
    ),
]
Sites = Annotated[
    str,
    typer.Option(
        "--sites",
        metavar="one|all|parts",
        help="Whether ops of a model, or also parts of layers, may run on the host's processor beside the accelerator.",
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="time|energy",
        help="Plan for the least time, or the fewest joules by the machine's model.",
    ),
]
Batch = Annotated[int, typer.Option("--batch", min=1, max=1 << 20, help="Rows of made-up inputs.")]
Tokens = Annotated[
    int, typer.Option("--tokens", min=1, max=1 << 24, help="Tokens per row of made-up inputs.")
]
_OF_MODELS = (".onnx", ".data", ".safetensors", ".gguf", ".pt2", ".pt", ".pth", ".bin", ".ckpt")


def no_model(path: Path | None) -> Path | None:
    """Return where to write text; raises ``typer.BadParameter`` where a model's file would be lost by that."""
    if path is not None and path.suffix.lower() in _OF_MODELS and path.exists():
        raise typer.BadParameter(f"{path} is there, and may be of a model; choose another name")
    return path


Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write it here.", callback=no_model),
]


def cache_dir_of(given: Path | None) -> Path:
    """Return the cache folder of this call."""
    return given.expanduser() if given is not None else default_cache_dir()


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Report a ``ValueError`` of the public functions, which they raise for wrong arguments, as wrong usage."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def machine_of(given: str | None, cache_dir: Path, source: str | None = None) -> Machine:
    """Return the machine named on the command line, by default this one, measured once.

    Where a ``source`` is what it is for, one that is nothing is refused before that.
    """
    from gascompile.api import plan as planning
    from gascompile.core.progress import task

    if source is not None:
        planning.require_source(source)
    with usage_errors(), task("Measuring this machine" if given is None else "Reading the machine"):
        return planning.machine_of(given, cache_dir)


class Limits(NamedTuple):
    """Sizes given on the command line."""

    budget: int | None
    """Of the place that computes, whatever it is called."""
    cpu: int | None
    nvme: int | None
    places: Sequence[str] = ()
    """``NAME=SIZE`` each."""

    @property
    def is_given(self) -> bool:
        """Whether there is any."""
        return any(size is not None for size in self[:3]) or bool(self.places)


def budget_of(limits: Limits, machine: Machine) -> Budget:
    """Return the budget; ``--budget`` means the place of ``machine`` that computes."""
    site = machine.compute_tier
    named = [("--cpu", "cpu", limits.cpu), ("--nvme", "nvme", limits.nvme)]
    sizes: dict[str, int] = {} if limits.budget is None else {site: limits.budget}
    options = dict.fromkeys(sizes, "--budget")
    named += [("--place", *_place_size(text)) for text in limits.places]
    for option, name, value in named:
        if value is None:
            continue
        if name in sizes:
            which = f", which computes on '{machine.name}'" if name == site else ""
            raise typer.BadParameter(
                f"{options[name]} and {option} both set the memory of '{name}'{which}; give one of them"
            )
        sizes[name], options[name] = value, option
    return Budget(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan is asked for by, made once by a verb and handed down whole."""

    source: str
    limits: Limits
    machine: str | None
    shape: tuple[int, int] = (1, 128)
    """Rows and tokens of made-up inputs."""
    cache_dir: Path
    time_limit_s: float
    strategy: str | None = None
    weights: str | None = None
    sites: str = "one"
    objective: str = "time"
    hosts: str | None = None
    """Over whose ranks, or over how many equal ``ranks``; ``train`` means a step in place of a request."""
    ranks: int | None = None
    train: bool = False

    @property
    def is_over_ranks(self) -> bool:
        """Whether a plan over ranks is meant."""
        return self.hosts is not None or self.ranks is not None or self.train

    @property
    def config(self) -> dict[str, Any]:
        """Options of ``compile`` and ``plan`` beside the machine and the budget."""
        names = ("cache_dir", "time_limit_s", "strategy", "weights", "sites", "objective")
        return {name: getattr(self, name) for name in names}

    def target(self, source: str | None = None) -> tuple[Machine, Budget]:
        """Return the machine and its budget; see ``machine_of``."""
        machine = machine_of(self.machine, self.cache_dir, source)
        return machine, budget_of(self.limits, machine)


def _place_size(text: str) -> tuple[str, int]:
    name, separator, value = text.rpartition("=")
    if not separator or not name:
        raise typer.BadParameter(f"--place takes NAME=SIZE, such as h0.nvme1=1TB, not {text!r}")
    return name, size(value)


def format_of(path: Path) -> str:
    """Return the ``format`` of a JSON file, or an empty text where it has none or is no such file."""
    if path.suffix != ".json" or not is_file(path):
        return ""
    try:
        data = read_json(path)
    except (FormatError, StorageError):
        return ""
    return str(data.get("format", "")) if isinstance(data, dict) else ""


def require_plan_or_bundle(path: Path) -> None:
    """Refuse a folder that is no bundle, such as the model's own, or one of several.

    Raises:
        FormatError: ``path`` is such a folder.
    """
    if is_folder(path) and not is_bundle(path):
        if inside := sorted(child.name for child in path.iterdir() if is_bundle(child)):
            raise FormatError(
                f"{path} holds several plans; name one of them: {', '.join(inside)[:1000]}"
            )
        raise FormatError(
            f"{path} holds no manifest.json, so it is no bundle; name a plan file or a bundle"
        )


def is_finished(path: Path) -> bool:
    """Return whether ``path`` is a plan file or a bundle."""
    return is_bundle(path) or reads(Plan, format_of(path))


def is_bundle(path: Path) -> bool:
    """Return whether ``path`` is a folder with a bundle's manifest."""
    return is_file(path / "manifest.json")
