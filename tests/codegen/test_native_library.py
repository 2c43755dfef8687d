"""Libraries that are kept: built once, also by several at once, and again where they are damaged."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gascompile.codegen.build import KernelBuildError
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
