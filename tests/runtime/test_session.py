"""Files are the ones that were planned on; memory and threads are given back."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gascompile.core.errors import PlanMismatchError, StorageError
from gascompile.core.machine import IoSettings
from gascompile.core.waiting import own_threads
from gascompile.runtime.protocols import read_at
from gascompile.runtime.run.session import Session
from tests.runtime.toys import LINK, make_plan, mlp, stamp


def reading_threads() -> int:
    return len(own_threads("gascompile-read"))


def test_missing_file(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    known = stamp(toy.path)
    toy.path.unlink()
    with pytest.raises(StorageError, match=r"toy\.safetensors.*compile again"):
        Session.for_plan(plan, sources=toy.sources, stamps=(known,))
    assert not reading_threads()


def test_changed_file_is_refused_at_open(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    known = stamp(toy.path)
    os.utime(toy.path, ns=(0, 0))
    with pytest.raises(StorageError, match=r"toy\.safetensors has changed.*compile again"):
        Session.for_plan(plan, sources=toy.sources, stamps=(known,))


def test_replaced_file_is_refused_at_the_next_run(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    x = torch.randn(4, 96)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        executor.run(x)
        kept = stamp(toy.path)
        copy = tmp_path / "copy"
        shutil.copy2(toy.path, copy)
        # Same size, same time, same name: another file all the same.
        os.utime(copy, ns=(kept.mtime_ns, kept.mtime_ns))
        copy.rename(toy.path)
        with pytest.raises(StorageError, match=r"toy\.safetensors was changed or replaced"):
            executor.run(x)
        toy.path.unlink()
        with pytest.raises(StorageError, match=r"toy\.safetensors is gone"):
            executor.run(x)


def test_rewritten_file_is_refused_at_the_next_run(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        executor.run(torch.randn(4, 96))
        with toy.path.open("ab") as stream:
            stream.write(b"x")
        with pytest.raises(StorageError, match="compile again"):
            executor.run(torch.randn(4, 96))


class Rewriter:
    """A reader that changes one value of the file before the ``at``-th read from now, in place and unobtrusively."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self._lock = threading.Lock()

    def write(self) -> None:
        stat = self.path.stat()
        with self.path.open("r+b") as stream:
            stream.seek(-2, os.SEEK_END)
            stream.write(bytes(2))
        os.utime(self.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def __call__(self, descriptor: int, into: memoryview, offset: int, /) -> int:
        with self._lock:
            self.at -= 1
            if not self.at:
                self.write()
        return read_at(descriptor, into, offset)


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_file_that_is_written_to_in_a_run_gives_no_result(tmp_path: Path, at: int) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(["layers.0.weight"]), seed=3)
    reader = Rewriter(toy.path)
    x = torch.randn(4, 96)
    with toy.session(plan, reader=reader) as session:
        executor = toy.executor(session, plan)
        torch.testing.assert_close(executor.run(x), toy.eager(x))
        reader.at = at
        with pytest.raises(StorageError, match="changed or replaced while it was in use"):
            executor.run(x)
        with pytest.raises(StorageError, match="changed or replaced while it was in use"):
            executor.run(x)


def test_resident_weights_are_of_the_file_as_it_is(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(toy.weights))
    reader = Rewriter(toy.path)
    with toy.session(plan, reader=reader) as session:
        executor = toy.executor(session, plan)
        executor.run(torch.randn(4, 96))
        reader.write()
        with pytest.raises(StorageError, match="changed or replaced while it was in use"):
            executor.run(torch.randn(4, 96))


def test_a_name_that_goes_to_another_file_in_a_run_changes_the_next_one(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    other = tmp_path / "other"
    other.write_bytes(bytes(toy.path.stat().st_size))
    reader = Rewriter(toy.path)
    reader.write = lambda: os.replace(other, toy.path)  # type: ignore[method-assign]
    x = torch.randn(4, 96)
    with toy.session(plan, reader=reader) as session:
        executor = toy.executor(session, plan)
        reader.at = 2
        torch.testing.assert_close(executor.run(x), toy.eager(x))
        with pytest.raises(StorageError, match="changed or replaced while it was in use"):
            executor.run(x)


def test_new_links_and_rights_change_no_weights(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    x = torch.randn(4, 96)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        changes: list[Callable[[], object]] = [
            lambda: os.link(toy.path, tmp_path / "link"),
            lambda: toy.path.chmod(0o400),
            (tmp_path / "link").unlink,
        ]
        for change in changes:
            change()
            torch.testing.assert_close(executor.run(x), toy.eager(x))


def test_closed_session_says_so(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    session = toy.session(plan)
    executor = toy.executor(session, plan)
    session.close()
    session.close()
    assert not reading_threads()
    with pytest.raises(StorageError, match="session is closed"):
        executor.run(torch.randn(4, 96))


def test_dropped_session_stops_its_threads(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    session = toy.session(plan)
    executor = toy.executor(session, plan)
    executor.run(torch.randn(4, 96))
    del session, executor
    gc.collect()
    assert not reading_threads()


def test_residents_load_in_order_of_first_use(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    residents = frozenset(toy.weights)
    plan = make_plan(toy.workload, residents=residents, io=IoSettings(num_threads=1))
    seen: list[tuple[int, int]] = []
    with Session.for_plan(
        plan, sources=toy.sources, progress=lambda done, total: seen.append((done, total))
    ) as session:
        executor = toy.executor(session, plan)
        x = torch.randn(4, 96)
        torch.testing.assert_close(executor.run(x), toy.eager(x))
        assert session.is_loaded
        report = executor.last_run
        assert report is not None
        total = sum(source.size_bytes for source in toy.sources.values())
        assert report.link_bytes == {LINK: total}
        executor.run(x)
        assert executor.last_run is not None
        assert executor.last_run.link_bytes == {LINK: 0}
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_weights_without_a_file_are_named(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(["layers.1.bias"]))
    sources = {name: s for name, s in toy.sources.items() if name != "layers.1.bias"}
    with pytest.raises(PlanMismatchError, match=r"layers\.1\.bias"):
        Session.for_plan(plan, sources=sources)
    with toy.session(plan) as session:
        del session.sources["layers.2.weight"]
        with pytest.raises(PlanMismatchError, match=r"layers\.2\.weight"):
            toy.executor(session, plan)


def test_plans_must_agree_on_the_arena(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    small = make_plan(toy.workload)
    large = make_plan(toy.workload, residents=frozenset(toy.weights))
    with toy.session(small) as session, pytest.raises(PlanMismatchError, match="arena"):
        toy.executor(session, large)
    one = make_plan(toy.workload, residents=frozenset(["layers.1.bias"]))
    with toy.session(large) as session, pytest.raises(PlanMismatchError, match=r"layers\.1\.bias"):
        toy.executor(session, one)


def test_weights_that_cannot_be_read_directly_warn_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = mlp(tmp_path)
    # One byte more in front of everything: no float starts at a multiple of its size.
    toy.path.write_bytes(b"x" + toy.path.read_bytes())
    toy.sources = {
        name: dataclasses.replace(
            source,
            extents=tuple(dataclasses.replace(e, offset=e.offset + 1) for e in source.extents),
        )
        for name, source in toy.sources.items()
    }
    plan = make_plan(toy.workload)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        x = torch.randn(4, 96)
        torch.testing.assert_close(executor.run(x), toy.eager(x))
        assert executor.last_run is not None
        assert executor.last_run.paths == {LINK: "page cache"}
    assert len(caplog.records) == 1
    assert "not aligned" in caplog.text


def test_a_process_may_end_with_a_session_open(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from tests.runtime.toys import make_plan, mlp\n"
        "toy = mlp(pathlib.Path(sys.argv[1]))\n"
        "plan = make_plan(toy.workload, residents=frozenset(['layers.1.weight']))\n"
        "session = toy.session(plan)\n"
        "executor = toy.executor(session, plan)\n"
        "executor.run(__import__('torch').zeros(4, 96))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
