"""The files of a bundle as data: whole by their checksums, and its plan and weights read. Needs no torch.

Listing a cache, checking or replaying a plan stops here: no graph is built of what a bundle says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from gascompile.core import serial
from gascompile.core.call_names import ANY_NAMES
from gascompile.core.checks.plan import check_plan_content
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import MAX_JSON_BYTES, read_regular
from gascompile.core.kernels import Fusion
from gascompile.core.plan import Plan
from gascompile.core.sources import FileStamp, WeightSource

FORMAT: Final = "gascompile.bundle/1"
FUSION: Final = "fusion.json"
STEP: Final = "step.json"
KERNELS: Final = re.compile(r"kernels-([0-9a-f]{40})\.(json|so)")
HELD: Final = "held.safetensors"
_DATA: Final = ("program.json", "plan.json", "weights.json")
_MAX_CODE_BYTES = 256 << 20  # of a file of machine code, which is read whole
_MAX_FILES = 1000  # of a bundle, each of which is opened to be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where the weights of a bundle lie and what their files looked like."""

    FORMAT: ClassVar[str] = "gascompile.weights/1"

    sources: Mapping[str, WeightSource]
    stamps: tuple[FileStamp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What the program of a training step does not say by itself."""

    FORMAT: ClassVar[str] = "gascompile.step/1"

    gradients: tuple[str, ...]
    """Parameters of the optimizer that the batch gives a gradient."""
    num_groups: int
    """Of the optimizer: a tensor of hyperparameters each, the program's last inputs."""
    outside: tuple[int, ...]
    """Of the inputs before those, which of the tensors that the model's digest met; -1 for a held constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFiles:
    """What the files of a bundle hold, as far as it is plain data."""

    folder: Path
    plan: Plan
    weights: Weights
    fusion: Fusion | None
    step: StepFacts | None
    positional: tuple[str, ...]
    versions: Mapping[str, str]
    listed: Mapping[str, str]
    """The digest of every file by its name."""
    raw: Mapping[str, bytes]
    """The files that are not read yet: the program, the kernels."""

    def read_held(self, max_bytes: int) -> bytes:
        """Return the file of held tensors, which may have as many bytes as what it holds needs."""
        return _read(self.folder, HELD, self.listed, max_bytes)


def read_bundle_files(folder: Path) -> BundleFiles:
    """Read the files of a bundle and compare their checksums.

    Raises:
        FormatError: the folder is no bundle, is damaged, or is of a version this reader does not know.
        StorageError: a file cannot be read.
    """
    manifest = serial.read_json(folder / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FormatError(
            f"{folder} is not a bundle of the format {FORMAT!r}; save it again with this version"
        )
    listed = _texts(manifest, "files", folder)
    positional = manifest.get("positional")
    if not isinstance(positional, list) or not all(
        isinstance(name, str) and (name.isidentifier() or name == ANY_NAMES) for name in positional
    ):
        raise FormatError(
            f"{folder / 'manifest.json'} names no positional arguments; save it again"
        )
    if len(listed) > _MAX_FILES:
        raise FormatError(f"{folder / 'manifest.json'} lists {len(listed)} files; save it again")
    code = [name for name in listed if KERNELS.fullmatch(name)]
    raw = {name: _read(folder, name, listed, MAX_JSON_BYTES) for name in _DATA}
    raw |= {name: _read(folder, name, listed, _MAX_CODE_BYTES) for name in code}
    plan = serial.from_json(
        Plan, serial.parse_json(raw["plan.json"], where="plan.json"), where="plan.json"
    )
    check_plan_content(plan, where="plan.json")
    weights = serial.from_json(
        Weights, serial.parse_json(raw["weights.json"], where="weights.json"), where="weights.json"
    )
    fusion = step = None
    if FUSION in listed:
        data = serial.parse_json(_read(folder, FUSION, listed, MAX_JSON_BYTES), where=FUSION)
        fusion = serial.from_json(Fusion, data, where=FUSION)
    if STEP in listed:
        data = serial.parse_json(_read(folder, STEP, listed, MAX_JSON_BYTES), where=STEP)
        step = serial.from_json(StepFacts, data, where=STEP)
    return BundleFiles(
        folder=folder,
        plan=plan,
        weights=_absolute(weights, folder),
        fusion=fusion,
        step=step,
        positional=tuple(positional),
        versions=_texts(manifest, "versions", folder),
        listed=listed,
        raw=raw,
    )


def _texts(manifest: Mapping[str, Any], field: str, folder: Path) -> dict[str, str]:
    texts = manifest.get(field)
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise FormatError(f"{folder / 'manifest.json'} has no {field!r}; save the bundle again")
    return texts


def _read(folder: Path, name: str, listed: Mapping[str, str], max_bytes: int) -> bytes:
    raw = read_regular(folder / name, max_bytes=max_bytes)
    if serial.raw_digest(raw) != listed.get(name):
        raise FormatError(
            f"{folder / name} is damaged: its checksum differs; save the bundle again"
        )
    return raw


def relocate(weights: Weights, places: Mapping[str, str]) -> Weights:
    """Return ``weights`` with the paths that ``places`` names replaced."""
    sources = {
        name: replace(
            source,
            extents=tuple(replace(e, path=places.get(e.path, e.path)) for e in source.extents),
        )
        for name, source in weights.sources.items()
    }
    stamps = tuple(replace(s, path=places.get(s.path, s.path)) for s in weights.stamps)
    return Weights(sources=sources, stamps=stamps)


def _absolute(weights: Weights, folder: Path) -> Weights:
    """Return ``weights`` with the files inside the bundle by their full paths.

    Raises:
        FormatError: a path is none, or leads from the bundle to somewhere else.
    """
    try:
        root = folder.resolve()
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot read {folder}: {error}") from error
    places = {}
    for stamp in weights.stamps:
        path = stamp.path
        if not path.isprintable() or len(path) > os.pathconf("/", "PC_PATH_MAX"):
            raise FormatError(
                f"weights.json: {ascii(path)[:200]} is no path; save the bundle again"
            )
        if not Path(path).is_absolute():
            if ".." in Path(path).parts:
                raise FormatError(f"weights.json: {path!a} leads out of the bundle; save it again")
            places[path] = str(root / path)
    return relocate(weights, places)
