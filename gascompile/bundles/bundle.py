"""Bundles (``gascompile.bundle/1``): a plan with its program, ready to run without solver or capture.

A folder of data files with a checksum each; weights stay where they are, by reference. The plan cache
is a folder of bundles. A bundle is written beside its final name and renamed, so it is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from gascompile.bundles.files import (
    FORMAT,
    FUSION,
    KERNELS,
    STEP,
    BundleFiles,
    StepFacts,
    Weights,
    read_bundle_files,
    relocate,
)
from gascompile.capture.saved.program_io import program_from_json, program_to_json
from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import exchange, open_regular, umask
from gascompile.core.kernels import Fusion, KernelFiles
from gascompile.core.plan import Plan
from gascompile.core.program import BoundSpec, Program
from gascompile.core.sources import FileStamp
from gascompile.weights.memory_layout import with_strides

WEIGHTS_FOLDER = "weights"
"""In a bundle: weight files that are no files of the user's."""
_HEADER_BYTES = 1 << 20  # of safetensors' header beside 4 KiB per tensor: far more than any needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Everything needed to execute a plan."""

    program: Program
    plan: Plan
    weights: Weights
    held: Mapping[str, torch.Tensor]
    """Constants and initial states: small tensors that stay in RAM outside the arena."""
    positional: tuple[str, ...]
    """Names of the model's leading positional arguments."""
    versions: Mapping[str, str]
    """Versions of the software that the program was captured with."""
    fusion: Fusion | None = None
    """Which ops run as compiled kernels; ``None`` where fusing is off."""
    step: StepFacts | None = None
    """What is known of a training step beside its program; ``None`` for a model's forward pass."""
    kernels: Mapping[str, KernelFiles] = field(default_factory=dict)
    """The kernels' machine code, by digest. It is run if it is trusted: see ``fusion.load_kernels``."""
    digest: str = ""
    """Of the program and the plan as they were read from files; empty for what was made here."""


def write_bundle(
    bundle: Bundle, folder: Path, *, overwrite: bool = False, enclose: Sequence[Path] = ()
) -> str:
    """Write ``bundle`` as ``folder`` and return the digest it is read with; an existing one stays unless ``overwrite``.

    Weight files named in ``enclose`` become part of the folder, by a hard link where that is possible.

    Raises:
        StorageError: the folder cannot be written; nothing half-written stays behind.
    """
    enclosed = {str(path): f"{WEIGHTS_FOLDER}/{path.name}" for path in enclose}
    contents = _contents_of(bundle, enclosed)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "positional": list(bundle.positional),
        "versions": dict(bundle.versions),
        "files": {name: serial.raw_digest(raw) for name, raw in contents.items()},
    }
    contents["manifest.json"] = json.dumps(manifest, indent=1).encode()
    temporary = ""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.")
        Path(temporary).chmod(0o777 & ~umask())  # mkdtemp makes folders for this user alone
        for name, raw in contents.items():
            serial.write_atomic(Path(temporary) / name, raw)
        for source, inside in enclosed.items():
            _link_or_copy(source, Path(temporary) / inside)
        if overwrite and folder.exists():
            if not exchange(temporary, folder):
                _replace(folder, temporary)
        elif not folder.exists():
            os.rename(temporary, folder)
    except OSError as error:
        if not (
            folder.exists() and not overwrite
        ):  # losing a race against an equal writer is no error
            raise StorageError(
                f"cannot write the bundle {folder}: {error.strerror or error}; free space or choose another folder"
            ) from error
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    return _digest_of_both(manifest["files"])


def _replace(folder: Path, temporary: str) -> None:
    """Have ``temporary`` in the place of ``folder``, where they cannot be swapped at once."""
    retired = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old.")
    try:
        os.replace(folder, Path(retired) / "bundle")
        os.rename(temporary, folder)
    finally:
        # Interrupted in between, the one from before goes back.
        if not folder.exists():
            os.rename(Path(retired) / "bundle", folder)
    shutil.rmtree(retired)


def _contents_of(bundle: Bundle, enclosed: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files of a bundle but for its manifest, by name."""
    contents = {
        "program.json": json.dumps(program_to_json(bundle.program), separators=(",", ":")).encode(),
        "plan.json": serial.dumps(bundle.plan).encode(),
        "weights.json": serial.dumps(relocate(bundle.weights, enclosed)).encode(),
        "held.safetensors": save_tensors(
            {name: tensor.detach().contiguous().clone() for name, tensor in bundle.held.items()}
        ),
    }
    if bundle.fusion is not None:
        contents[FUSION] = serial.dumps(bundle.fusion).encode()
    if bundle.step is not None:
        contents[STEP] = serial.dumps(bundle.step).encode()
    for digest, files in bundle.kernels.items():
        contents[f"kernels-{digest}.json"] = files.record
        contents[f"kernels-{digest}.so"] = files.code
    return contents


def read_bundle(folder: Path, *, allow_code: bool = False) -> Bundle:
    """Read a bundle and check every checksum; nothing in it is executed.

    Args:
        folder: the bundle.
        allow_code: let its program call ops that are not on the list of ``program_ops``.

    Raises:
        FormatError: the folder is no bundle, is damaged, or is of a version this reader does not know.
        StorageError: a file cannot be read.
    """
    files = read_bundle_files(folder)
    where = "program.json"
    data = serial.parse_json(files.raw[where], where=where)
    program = program_from_json(data, where=where, allow_code=allow_code)
    return Bundle(
        program=program,
        plan=files.plan,
        weights=files.weights,
        held=_read_held(files, program),
        positional=files.positional,
        versions=files.versions,
        fusion=files.fusion,
        step=files.step,
        kernels=_read_kernels(files.raw, folder),
        digest=_digest_of_both(files.listed),
    )


def _digest_of_both(listed: Mapping[str, str]) -> str:
    return serial.digest([listed["program.json"], listed["plan.json"]])


def _read_held(files: BundleFiles, program: Program) -> dict[str, torch.Tensor]:
    """Return the held tensors; there are no more bytes of them than the program has names for."""
    known = _held_specs(files, program)
    bound = known.values()
    own_bytes = sum(math.prod(of.shape) * getattr(torch, of.dtype).itemsize for of in bound)
    most_bytes = own_bytes + _HEADER_BYTES + 4096 * len(bound)
    try:
        held = load_tensors(files.read_held(most_bytes))
        names = held if files.step is None else known
        return {name: with_strides(held[name], known[name]) for name in names}
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise FormatError(f"{files.folder} is damaged ({error}); save the bundle again") from error


def _held_specs(files: BundleFiles, program: Program) -> Mapping[str, BoundSpec]:
    """Return what of a program may be held in its bundle: of a step, the constants among its inputs."""
    step = files.step
    if step is None:
        return program.bound
    first = len(program.inputs) - step.num_groups - len(step.outside)
    if first < 0 or step.num_groups < 0:
        raise FormatError(f"{files.folder / STEP} is of another program; compile the step again")
    return {
        spec.name: BoundSpec(dtype=str(spec.dtype), shape=spec.upper_shape())
        for spec, number in zip(program.inputs[first:], step.outside, strict=False)
        if number < 0
    }


def _read_kernels(raw: Mapping[str, bytes], folder: Path) -> dict[str, KernelFiles]:
    """Return the kernels among the files of a bundle; what they are called is what they are."""
    kernels: dict[str, KernelFiles] = {}
    for digest in sorted({m.group(1) for m in map(KERNELS.fullmatch, raw) if m is not None}):
        code = raw.get(f"kernels-{digest}.so", b"")
        files = KernelFiles(record=raw.get(f"kernels-{digest}.json", b""), code=code)
        if files.digest != digest:
            raise FormatError(
                f"the kernels {digest} of {folder} are damaged; save the bundle again"
            )
        kernels[digest] = files
    return kernels


def _link_or_copy(source: str, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without links.
        shutil.copy2(source, target)


def require_unchanged(stamp: FileStamp) -> None:
    """Raise ``StorageError`` unless the file is there with the size and the time of its stamp."""
    try:
        stat = os.stat(stamp.path)
    except OSError as error:
        raise StorageError(f"cannot read {stamp.path}: {error.strerror or error}") from error
    if (stat.st_size, stat.st_mtime_ns) != (stamp.size_bytes, stamp.mtime_ns):
        raise StorageError(
            f"{stamp.path} has changed since it was planned on; compile the model again"
        )


def content_stamp(stamp: FileStamp, progress: Callable[[int], None] = lambda n: None) -> FileStamp:
    """Return ``stamp`` with the digest of the whole file; ``progress`` gets the bytes of each block read.

    Raises:
        StorageError: the file cannot be read.
    """
    state = hashlib.blake2b(digest_size=20)
    try:
        with open(open_regular(stamp.path), "rb") as stream:
            while block := stream.read(16 << 20):
                state.update(block)
                progress(len(block))
    except OSError as error:
        raise StorageError(f"cannot read {stamp.path}: {error.strerror or error}") from error
    return FileStamp(
        path=stamp.path,
        size_bytes=stamp.size_bytes,
        mtime_ns=stamp.mtime_ns,
        digest=f"content:{state.hexdigest()}",
    )
