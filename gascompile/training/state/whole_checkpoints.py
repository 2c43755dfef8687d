"""Whole checkpoints: folders with a manifest of digests, each written under another name and then renamed.

Whatever ends the process, a folder under the name of a checkpoint is whole. What is removed is removed under another
name, too, and only what was written here: no link, and no folder with a file that the manifest does not list.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError, StorageError
from gascompile.runtime.transfer.copying import write_all
from gascompile.training.attempt import Attempt, begin

FORMAT = "gascompile.training-checkpoint/2"
MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d{8})")
_MOST = 99_999_999
_LEFTOVER = re.compile(r"\.writing-\d{8}|\.old-checkpoint-\d{8}")


def found_in(folder: Path) -> list[Path]:
    """Return the whole checkpoints, the oldest first."""
    return sorted(path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name))


Linkable = tuple[Path, int, frozenset[str]]
"""A checkpoint, the generation of its frozen tensors, and their names."""


class Saving:
    """A checkpoint on its way: its files are written first, and then made whole, by any thread."""

    def __init__(self, folder: Path) -> None:
        """Make an empty one; raises ``OSError``."""
        for leftover in folder.iterdir():
            if _LEFTOVER.fullmatch(leftover.name) and not leftover.is_symlink():
                shutil.rmtree(leftover)
        before = found_in(folder)
        number = int(before[-1].name[-8:]) + 1 if before else 1
        if number > _MOST:
            # Of more digits, no load would find it.
            raise OSError(errno.EOVERFLOW, f"there is no number after {before[-1].name}")
        self._folder = folder
        self.temporary = folder / f".writing-{number:08d}"
        self.final = folder / f"checkpoint-{number:08d}"
        self.files: dict[str, int] = {}
        """Descriptors of the files that were written, by name: what fails to reach the drive is said through these."""
        self.digests: dict[str, str] = {}
        """Of files that were not written, but linked."""
        self.temporary.mkdir()

    def add(self, name: str, data: bytes) -> None:
        """Write a small file; raises ``OSError``."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.files[name] = os.open(self.temporary / name, flags, 0o666)
        write_all(self.files[name], data, 0)

    def finish(self, keep: int) -> None:
        """Have all on the drive, digests last; rename it; remove older ones beyond the newest ``keep``.

        Raises:
            OSError: it is not whole; the checkpoints before it are still there.
        """
        try:
            for descriptor in self.files.values():
                os.fsync(descriptor)
            files = {
                file.name: {
                    "bytes": file.stat().st_size,
                    "sha256": self.digests.get(file.name) or _digest(file),
                }
                for file in sorted(self.temporary.iterdir())
            }
            self.add(MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1).encode())
            os.fsync(self.files[MANIFEST])
            _sync_folder(self.temporary)
            os.rename(self.temporary, self.final)
            _sync_folder(self._folder)
        finally:
            self.abandon()
        for old in [path for path in found_in(self._folder) if _is_own(path)][:-keep]:
            # Under another name first, so that none is ever half there under its own.
            retired = self._folder / f".old-{old.name}"
            with contextlib.suppress(OSError):  # the next save tries again
                os.rename(old, retired)
                shutil.rmtree(retired)

    def abandon(self) -> None:
        """Let go of the files, and remove what has not become whole; idempotent."""
        while self.files:
            os.close(self.files.popitem()[1])
        shutil.rmtree(self.temporary, ignore_errors=True)


class Behind:
    """A save that goes on in an own thread, whoever waits for it and is interrupted."""

    def __init__(self, saving: Saving, keep: int, linkable: Linkable) -> None:
        """Begin nothing yet; ``linkable`` is what the next save may link to once this one is whole."""
        self.linkable = linkable
        self._saving, self._keep, self._attempt = saving, keep, Attempt()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in an error or not."""
        return self._attempt.is_over

    def begin(self) -> None:
        """Start the thread."""
        begin(self._run)

    def wait(self) -> BaseException | None:
        """Block until the end; return what it has raised."""
        if not self.is_over:
            # Whoever called ``begin`` may have been interrupted before there was a thread.
            begin(self._run)
            self._attempt.wait()
        return self._attempt.error

    def _run(self) -> None:
        if self._attempt.claim():
            try:
                self._saving.finish(self._keep)
            except BaseException as error:  # noqa: BLE001 - who waits raises it
                self._attempt.error = error
            self._attempt.end()


def _is_own(folder: Path) -> bool:
    """Return whether a checkpoint holds what was written here and nothing else."""
    if folder.is_symlink():
        return False
    try:
        manifest = _manifest(folder)
        return {path.name for path in folder.iterdir()} <= {MANIFEST, *manifest["files"]}
    except (OSError, StorageError, CheckpointError, KeyError, TypeError):
        return False


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = serial.read_json(folder / MANIFEST)
    except FormatError as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged; take the folder from a backup"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is no checkpoint of the format {FORMAT!r}")
    return manifest


def verify(folder: Path) -> None:
    """Compare all files with the manifest; raises ``CheckpointError``."""
    for name, entry in _manifest(folder)["files"].items():
        file = folder / name
        size_bytes = file.stat().st_size if file.is_file() else -1
        if size_bytes != entry["bytes"]:
            why = f"it has {max(size_bytes, 0)} bytes, and {entry['bytes']} were saved"
        elif _digest(file) != entry["sha256"]:
            why = "its SHA-256 is not that of what was saved"
        else:
            continue
        raise CheckpointError(f"{file} is damaged: {why}; take the folder from a backup")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
