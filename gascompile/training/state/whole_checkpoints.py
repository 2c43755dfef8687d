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
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError, StorageError
from gascompile.runtime.transfer.copying import write_all
from gascompile.training.attempt import Attempt, begin

FORMAT = "gascompile.training-checkpoint/2"
RANKS_FORMAT = "gascompile.training-checkpoint/3"
"""Of files that several ranks have written, in which tensors may be in pieces."""
MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d{8})")
_MOST = 99_999_999  # the names have eight digits
_LEFTOVER = re.compile(r"\.writing-\d{8}(-[0-9a-f]{8})?|\.old-checkpoint-\d{8}")
PROBE, INCOMING = ".probe-", ".incoming-"
"""What names of files begin with by which ranks see whose folder they share, and of files that come from another."""
_PROBE = re.compile(r"\.probe-[0-9a-f]{32}")


def found_in(folder: Path) -> list[Path]:
    """Return the whole checkpoints, the oldest first."""
    return sorted(path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name))


def clear(folder: Path) -> None:
    """Remove what saves have left that never ended; raises ``OSError``."""
    for leftover in folder.iterdir():
        if _LEFTOVER.fullmatch(leftover.name) and not leftover.is_symlink():
            shutil.rmtree(leftover)
        elif _PROBE.fullmatch(leftover.name):
            leftover.unlink(missing_ok=True)


def next_number(folder: Path) -> int:
    """Return the number of the next checkpoint; raises ``OSError``."""
    before = found_in(folder)
    number = int(before[-1].name[-8:]) + 1 if before else 1
    if number > _MOST:
        # Of more digits, no load would find it.
        raise OSError(errno.EOVERFLOW, f"there is no number after {before[-1].name}")
    return number


Linkable = tuple[Path, int, frozenset[str]]
"""A checkpoint, the generation of its frozen tensors, and their names."""


Listed = dict[str, dict[str, Any]]
"""Bytes and SHA-256 of files by name."""


def listed_of(
    folder: Path, files: Mapping[str, int], digests: Mapping[str, str] = MappingProxyType({})
) -> Listed:
    """Have files on the drive; return what the manifest says of them and of those with known digests.

    Args:
        folder: of all of them.
        files: descriptors by name.
        digests: by name.

    Raises:
        OSError: one is not on the drive.
    """
    for descriptor in files.values():
        os.fsync(descriptor)
    return {
        name: {
            "bytes": (folder / name).stat().st_size,
            "sha256": digests.get(name) or digest_of(folder / name),
        }
        for name in sorted({*files, *digests})
    }


class Saving:
    """A checkpoint on its way: its files are written first, and then made whole, by any thread."""

    def __init__(self, folder: Path, number: int | None = None, mark: str = "") -> None:
        """Make an empty one; raises ``OSError``.

        Args:
            folder: of checkpoints.
            number: of this one; the next, if ``None``.
            mark: tells its name, while it is written, from those of others with the same number.
        """
        clear(folder)
        number = next_number(folder) if number is None else number
        self._folder = folder
        self.temporary = folder / f".writing-{number:08d}{mark}"
        self.final = folder / f"checkpoint-{number:08d}"
        self.files: dict[str, int] = {}
        """Descriptors of the files that were written, by name: what fails to reach the drive is said through these."""
        self.digests: dict[str, str] = {}
        """Of files that were not written, but linked."""
        self.make()

    def make(self) -> None:
        """Make the folder; raises ``OSError``."""
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
            self.complete(self.settled(), FORMAT)
        finally:
            self.abandon()
        self.retire(keep)

    def settled(self) -> Listed:
        """Have the files that were written here on the drive; return what the manifest says of them.

        Raises:
            OSError: a file is not there.
        """
        return listed_of(self.temporary, self.files, self.digests)

    def complete(self, files: Listed, form: str, here: Collection[str] | None = None) -> None:
        """Write the manifest of files that are on the drive, and rename the folder; raises ``OSError``.

        Args:
            files: all of the checkpoint.
            form: the format.
            here: those of this folder; all, if ``None``.
        """
        there = {path.name for path in self.temporary.iterdir()}
        if there != set(files if here is None else here):
            odd = sorted(there.symmetric_difference(files if here is None else here))
            raise OSError(errno.ENOENT, f"{', '.join(odd[:3])} came or went while it was written")
        self.add(MANIFEST, json.dumps({"format": form, "files": files}, indent=1).encode())
        os.fsync(self.files[MANIFEST])
        sync_folder(self.temporary)
        os.rename(self.temporary, self.final)
        sync_folder(self._folder)

    def retire(self, keep: int) -> None:
        """Remove older ones beyond the newest ``keep``."""
        for old in [path for path in found_in(self._folder) if _is_own(path)][:-keep]:
            # Under another name first, so that none is ever half there under its own.
            retired = self._folder / f".old-{old.name}"
            with contextlib.suppress(OSError):  # the next save tries again
                os.rename(old, retired)
                shutil.rmtree(retired)

    def abandon(self) -> None:
        """Let go of the files, and remove what has not become whole; idempotent."""
        self.close_files()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def close_files(self) -> None:
        """Let go of the files."""
        while self.files:
            os.close(self.files.popitem()[1])


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
        names = {path.name for path in folder.iterdir() if not path.name.startswith(INCOMING)}
        return names <= {MANIFEST, *manifest["files"]}
    except (OSError, StorageError, CheckpointError, KeyError, TypeError):
        return False


def _manifest(folder: Path) -> dict[str, Any]:
    """Return what a manifest says, whose names are those of files in its folder."""
    damaged = f"{folder / MANIFEST} is damaged; take the folder from a backup"
    try:
        manifest = serial.read_json(folder / MANIFEST)
    except FormatError as error:
        raise CheckpointError(damaged) from error
    forms = (FORMAT, RANKS_FORMAT)
    if not isinstance(manifest, dict) or manifest.get("format") not in forms:
        raise CheckpointError(
            f"{folder} is no checkpoint of the formats {' and '.join(map(repr, forms))}"
        )
    listed = manifest.get("files")
    files: dict[str, Any] = listed if isinstance(listed, dict) else {"": None}
    entries = files.values()
    sound = all(isinstance(e, dict) and {"bytes", "sha256"} <= e.keys() for e in entries)
    if not sound or any(Path(name).name != name for name in files):
        raise CheckpointError(damaged)
    return manifest


def listed_in(folder: Path) -> Listed:
    """Return what the manifest of a checkpoint says of its files; raises ``CheckpointError``."""
    files: Listed = _manifest(folder)["files"]
    return files


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files that a checkpoint lists and that are there; raises ``CheckpointError``."""
    listed = sorted(name for name in listed_in(folder) if name.endswith(".safetensors"))
    return [folder / name for name in listed if (folder / name).is_file()]


def verify(folder: Path) -> None:
    """Compare all files with the manifest; raises ``CheckpointError``."""
    for name, why in damaged(folder).items():
        raise CheckpointError(f"{folder / name} is damaged: {why}; take the folder from a backup")


def damaged(folder: Path, share: int = 0, of: int = 1) -> dict[str, str]:
    """Return the files of a share that are missing or others than were saved, and why; raises ``CheckpointError``."""
    why_of = {}
    for name, entry in list(listed_in(folder).items())[share::of]:
        file = folder / name
        size_bytes = file.stat().st_size if file.is_file() else -1
        if size_bytes != entry["bytes"]:
            why = f"it has {max(size_bytes, 0)} bytes, and {entry['bytes']} were saved"
        elif digest_of(file) != entry["sha256"]:
            why = "its SHA-256 is not that of what was saved"
        else:
            continue
        why_of[name] = why
    return why_of


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file; raises ``OSError``."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Have the names of a folder's files on the drive; raises ``OSError``."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
