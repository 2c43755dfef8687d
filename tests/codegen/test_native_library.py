"""Libraries that are kept: built once, also by several at once, and again where they are damaged."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gascompile.codegen import allocator_library
from gascompile.codegen.build import KernelBuildError, has_compiler
from gascompile.codegen.native_library import kept_library

_CHILD = """
import sys, time
from pathlib import Path
from gascompile.codegen.native_library import kept_library

def build():
    with (Path(sys.argv[1]) / "built").open("a") as file:
        file.write("x")
    time.sleep(0.5)
    return b"code"

kept_library(Path(sys.argv[1]) / "native" / "some.so", build)
"""


def test_of_several_that_miss_it_one_builds_it(tmp_path: Path) -> None:
    built: list[int] = []
    begin = threading.Barrier(4)

    def build() -> bytes:
        built.append(1)
        # Long enough for the others to miss it, too.
        time.sleep(0.2)
        return b"code"

    def find() -> None:
        begin.wait()
        assert kept_library(tmp_path / "native" / "some.so", build)

    threads = [threading.Thread(target=find) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    assert (tmp_path / "native" / "some.so").read_bytes().startswith(b"code")


def test_processes_wait_for_the_one_that_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    children = [subprocess.Popen(command) for _ in range(2)]
    assert [child.wait(120) for child in children] == [0, 0]
    assert (tmp_path / "built").read_text() == "x"


def test_the_next_one_builds_what_another_could_not(tmp_path: Path) -> None:
    path = tmp_path / "native" / "some.so"

    def fails() -> bytes:
        raise KernelBuildError("no")

    with pytest.raises(KernelBuildError, match="no"):
        kept_library(path, fails)
    assert kept_library(path, None) is None
    assert kept_library(path, lambda: b"code") == path


def test_a_damaged_one_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "native" / "some.so"
    kept_library(path, lambda: b"old code")
    path.write_bytes(path.read_bytes()[:-1])
    assert kept_library(path, None) is None
    assert "is damaged" in caplog.text
    kept_library(path, lambda: b"new code")
    assert path.read_bytes().startswith(b"new code")


_FORKS = """
import fcntl, os, sys
from pathlib import Path
from gascompile.codegen.native_library import kept_library

go_on, stop = os.pipe()

def build():
    if os.fork() == 0:
        os.close(stop)
        os.read(go_on, 1)
        os._exit(0)
    return b"code"

kept_library(Path(sys.argv[1]) / "native" / "some.so", build)
folder = os.open(Path(sys.argv[1]) / "native", os.O_RDONLY)
fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.close(stop)
os.wait()
"""


def test_a_child_that_is_forked_meanwhile_does_not_hold_the_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FORKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_compiled_in_the_background_is_whole_once_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(allocator_library, "_LOADED", [])
    allocator_library.begin_building(tmp_path)
    begun = threading.Thread(target=allocator_library.await_building)
    begun.start()
    allocator_library.await_building()
    begun.join()
    (library,) = (tmp_path / "native").glob("*.so")
    before = library.stat().st_mtime_ns
    assert kept_library(library, None) == library
    allocator_library.begin_building(tmp_path)
    allocator_library.await_building()
    assert library.stat().st_mtime_ns == before


def test_a_compiler_that_is_missing_in_the_background_is_said_once_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(allocator_library, "_LOADED", [])
    monkeypatch.setenv("CXX", "no-such-compiler")
    allocator_library.begin_building(tmp_path)
    allocator_library.await_building()
    assert not caplog.text
    assert allocator_library.allocation_counter(tmp_path) is None
    assert "no-such-compiler" in caplog.text
