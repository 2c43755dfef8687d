"""Converted weights in the store: processes at the same time, killed ones, full disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from gascompile.core.errors import StorageError
from gascompile.formats.quantize import pack
from gascompile.weights import convert as form_store
from gascompile.weights.checkpoint import Checkpoint, open_checkpoint
from gascompile.weights.convert import Item, conversion_errors, converted
from gascompile.weights.store_check import NOTES

ROWS, COLUMNS = 600, 8192
"""Several blocks, so that there is a middle to be killed in."""
_WORK = """
import os, signal, sys
from pathlib import Path
from gascompile.weights import convert as form_store
from tests.integration.test_form_store import convert
folder, way = Path(sys.argv[1]), sys.argv[2]
if way == "killed":
    pack, calls = form_store.pack, []
    def counted(*args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return pack(*args)
    form_store.pack = counted
print("ready", flush=True)
sys.stdin.readline()
print(next(iter(convert(folder).stamps)).path)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint of one weight."""
    torch.manual_seed(0)
    save_file({"w": torch.randn(ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    return tmp_path


def convert(folder: Path) -> Checkpoint:
    """Convert the weight to int8."""
    found = open_checkpoint(folder / "model.safetensors")
    return converted(
        {"w": Item(source=found.sources["w"], wire="int8")}, found.stamps, folder / "store"
    )


def assert_right(folder: Path) -> None:
    """Check that the store holds one file, whole, and nothing half-written."""
    (file,) = (f for f in (folder / "store").iterdir() if f.name not in {".lock", NOTES})
    exact = load_file(folder / "model.safetensors")["w"]
    assert torch.equal(load_file(file)["w"], pack(exact, "int8", 16))
    assert 0 < conversion_errors(file)["w"] < 0.02


def worker(folder: Path, way: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WORK, str(folder), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()


def test_two_processes_at_once_write_one_file(folder: Path) -> None:
    both = [worker(folder, "whole"), worker(folder, "whole")]
    for process in both:
        start(process)
    paths = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(paths) == 1
    assert_right(folder)


def test_other_values_under_the_same_time_are_converted_anew(folder: Path) -> None:
    file = folder / "model.safetensors"
    convert(folder)
    time_ns = file.stat().st_mtime_ns
    save_file({"w": torch.randn(ROWS, COLUMNS)}, file)
    os.utime(file, ns=(time_ns, time_ns))
    (stamp,) = convert(folder).stamps
    packed = load_file(stamp.path)["w"]
    assert torch.equal(packed, pack(load_file(file)["w"], "int8", 16))
    assert convert(folder).stamps == (stamp,)


def test_a_killed_process_leaves_nothing_that_is_used(folder: Path) -> None:
    process = worker(folder, "killed")
    start(process)
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert not list((folder / "store").glob("*.safetensors"))
    # What it had written is there, cut short, and goes when the weights are converted again.
    assert [f for f in (folder / "store").glob(".*.safetensors.*") if f.stat().st_size]
    convert(folder)
    assert_right(folder)


def test_too_little_space_is_found_before_writing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=ROWS * COLUMNS)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=r"need 5\.\d+ MiB .* 4\.69 MiB are free"):
        convert(folder)
    assert [f.name for f in (folder / "store").iterdir()] == [".lock"]


def test_a_disk_that_fills_up_is_told_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = form_store._convert

    def half(item: Item, out: form_store._Hashed, advance: Callable[[int], None]) -> float:
        whole(item, out, advance)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(form_store, "_convert", half)
    with pytest.raises(StorageError, match="the disk is full"):
        convert(folder)
    assert [f.name for f in (folder / "store").iterdir()] == [".lock"]
    monkeypatch.undo()
    convert(folder)
    assert_right(folder)


def test_a_checkpoint_that_changes_meanwhile_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = form_store._convert

    def changed(item: Item, out: form_store._Hashed, advance: Callable[[int], None]) -> float:
        os.utime(folder / "model.safetensors", (1, 1))
        return whole(item, out, advance)

    monkeypatch.setattr(form_store, "_convert", changed)
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        convert(folder)
    assert [f.name for f in (folder / "store").iterdir()] == [".lock"]
