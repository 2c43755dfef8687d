"""The compiler as a process of its own: what it costs whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gascompile.codegen.build import KernelBuildError, compile_library


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script that stands in for the compiler."""
    script = tmp_path / "compiler"
    script.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_the_kernel_kills_the_compiler_before_its_caller(compiler: Path) -> None:
    """A compiler takes hundreds of megabytes; within a limit the largest process would go: the model's."""
    mine = Path("/proc/self/oom_score_adj")
    before = mine.read_text()
    compiler.write_text(
        '#!/bin/sh\ncp /proc/self/oom_score_adj library.so; echo "$@" >>library.so\n'
    )
    score, arguments = compile_library("int one;", flags=("-O2", "-D a=' b'")).decode().splitlines()
    assert score == "1000"
    assert arguments.startswith("-O2 -D a=' b' -shared")
    assert mine.read_text() == before


def test_a_compiler_that_was_killed_is_an_error_of_the_build(compiler: Path) -> None:
    compiler.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(KernelBuildError, match=f"'{compiler}' was killed, probably as memory"):
        compile_library("int one;")
