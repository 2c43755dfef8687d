"""Only what this user alone can have written is loaded or used as a cache."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from gascompile.core.config import CompileConfig
from gascompile.core.errors import StorageError, UnsafeCacheWarning
from gascompile.core.files import exclusive, open_lock, open_regular, read_regular
from gascompile.core.own_files import is_own, load_own, open_own, own_cache, read_own
from gascompile.training.state.checkpoints import CheckpointFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "own"
    made.mkdir(mode=0o700)
    (made / "code").write_bytes(b"code")
    (made / "code").chmod(0o600)
    return made


def test_ones_own_file_is_read(folder: Path) -> None:
    assert read_own(folder / "code") == b"code"
    assert is_own(folder / "code") and not is_own(folder / "none")


@pytest.mark.parametrize(("path", "mode"), [("code", 0o620), ("code", 0o602), (".", 0o720), (".", 0o702)])  # fmt: skip
def test_what_others_may_write_is_refused(folder: Path, path: str, mode: int) -> None:
    (folder / path).chmod(mode)
    with pytest.raises(StorageError, match=f"others may write to it \\(mode {mode:o}\\)"):
        read_own(folder / "code")
    with pytest.raises(StorageError):
        load_own(folder / "code")
    assert not is_own(folder / "code")


def test_what_belongs_to_another_user_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StorageError, match=f"belongs to user {user}, this is user {user + 1}"):
        open_own(folder / "code")
    with pytest.warns(UnsafeCacheWarning, match=f"belongs to user {user}"):
        assert own_cache(folder) != folder


def test_a_link_is_not_followed_and_a_pipe_not_waited_for(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "code")
    with pytest.raises(OSError, match="symbolic link"):
        read_own(folder / "link")
    os.mkfifo(folder / "pipe", 0o600)
    with pytest.raises(StorageError, match="no regular file"):
        read_own(folder / "pipe")


def test_a_library_is_loaded_from_what_was_checked(folder: Path) -> None:
    with pytest.raises(OSError, match="code cannot be loaded"):
        load_own(folder / "code")
    assert isinstance(ctypes.CDLL(None), ctypes.CDLL)


def test_a_cache_is_made_for_its_user_alone_and_an_open_one_replaced(tmp_path: Path) -> None:
    kept = CompileConfig(cache_dir=tmp_path / "new" / "cache").cache_dir
    assert kept == tmp_path / "new" / "cache" and kept.stat().st_mode & 0o777 == 0o700
    kept.chmod(0o777)
    with pytest.warns(UnsafeCacheWarning, match=r"others may write to it \(mode 777\)"):
        other = CompileConfig(cache_dir=kept).cache_dir
    assert other != kept and other.stat().st_mode & 0o777 == 0o700
    assert CompileConfig(cache_dir=kept).cache_dir == other, "and it is said once"


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/", "pipe", "a" * 5000, "a\0b"])
def test_only_regular_files_are_opened(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((StorageError, OSError)):
        open_regular(tmp_path / path)
    with pytest.raises(StorageError):
        read_regular(tmp_path / path, max_bytes=10)


def test_a_lock_is_a_file_of_its_own_and_nothing_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("years of it")
    (tmp_path / "link").symlink_to(tmp_path / "diary")
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("link", "a link"), ("pipe", "a pipe")):
        with pytest.raises(StorageError, match=f"is {kind}, not a regular file"):
            open_lock(tmp_path / name)
        with pytest.raises(StorageError, match=f"is {kind}"), exclusive(tmp_path / name):
            pass
    kept = CheckpointFolder(tmp_path / "run")
    kept.folder.mkdir()
    (kept.folder / "lock").symlink_to(tmp_path / "diary")
    with pytest.raises(StorageError, match="is a link"):
        kept._take()
    assert (tmp_path / "diary").read_text() == "years of it"
    os.close(open_lock(tmp_path / "new"))
    assert (tmp_path / "new").is_file()
