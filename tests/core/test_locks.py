"""Locks of the cache: also in folders that nobody here can write to, as those that container images bring."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from gascompile.core import files
from gascompile.core.errors import StorageError
from gascompile.core.files import exclusive
from gascompile.weights import store
from gascompile.weights.store import spill

TENSORS = {"weight": torch.arange(12.0)}


def _refused(number: int) -> mock._patch[mock.MagicMock]:
    error = OSError(number, os.strerror(number))
    return mock.patch.object(files, "open_lock", side_effect=error)


def _is_free(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_where_nothing_can_be_written_nothing_is_locked(tmp_path: Path, number: int) -> None:
    with _refused(number), exclusive(tmp_path / ".lock"):
        assert not (tmp_path / ".lock").exists()


def test_a_lock_that_somebody_else_made_is_held(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    lock.touch()
    with _refused(errno.EACCES), exclusive(lock):
        assert not _is_free(lock)
    assert _is_free(lock)


@pytest.mark.parametrize(
    ("number", "folder"), [(errno.ENOSPC, ""), (errno.EIO, ""), (errno.EROFS, "none")]
)
def test_other_failures_are_told(tmp_path: Path, number: int, folder: str) -> None:
    path = tmp_path / folder / ".lock"
    missing = mock.patch.object(Path, "mkdir", side_effect=OSError(number, "no"))
    with (
        _refused(number),
        missing,
        pytest.raises(StorageError, match="pass another cache_dir"),
        exclusive(path),
    ):
        pass


def test_weights_that_are_there_are_used_and_others_refused(tmp_path: Path) -> None:
    """As of a file system that is mounted for reading alone, where not even what is missing can be removed."""
    kept = tmp_path / "store"
    spill(TENSORS, kept)
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    with (
        _refused(errno.EROFS),
        mock.patch.object(store, "save_file", side_effect=read_only),
        mock.patch.object(Path, "unlink", side_effect=read_only),
    ):
        found = spill(TENSORS, kept)
        with pytest.raises(StorageError, match=r"cannot write .*Read-only file system"):
            spill({"weight": torch.zeros(3)}, kept)
    assert torch.equal(load_file(found.stamps[0].path)["weight"], TENSORS["weight"])
