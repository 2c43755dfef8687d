"""The memory limit under control groups of both versions, laid out in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gascompile.core.errors import StorageError
from gascompile.cost_models.measure import host
from gascompile.cost_models.measure.host import (
    OtherWork,
    cpu_model,
    file_system_id,
    free_bytes,
    has_direct_io,
    memory_limit,
    works_with,
)

RAM_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit(tmp_path: Path, groups: str, files: dict[str, str]) -> tuple[int, str]:
    listing = tmp_path / "cgroup"
    listing.write_text(groups)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = memory_limit(cgroup_list=listing, cgroup_root=tmp_path / "fs")
    return found.size_bytes, found.origin


def test_no_control_group_means_ram(tmp_path: Path) -> None:
    assert limit(tmp_path, "", {}) == (RAM_BYTES, "physical RAM")


def test_version_2(tmp_path: Path) -> None:
    files = {"app/job/memory.max": "max\n", "app/memory.max": "1000000\n"}
    size_bytes, origin = limit(tmp_path, "0::/app/job\n", files)
    assert size_bytes == 1_000_000
    assert origin.endswith("app/memory.max")


def test_version_1(tmp_path: Path) -> None:
    groups = "8:pids:/\n4:memory:/app\n0::/\n"
    files = {
        "memory/app/memory.limit_in_bytes": "2000000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert limit(tmp_path, groups, files)[0] == 2_000_000


def test_inside_a_container_the_mount_itself_counts(tmp_path: Path) -> None:
    assert limit(tmp_path, "0::/host/path\n", {"memory.max": "3000000"})[0] == 3_000_000


def test_a_limit_above_ram_is_none(tmp_path: Path) -> None:
    files = {"memory.max": str(2 * RAM_BYTES)}
    assert limit(tmp_path, "0::/\n", files) == (RAM_BYTES, "physical RAM")


def test_this_host() -> None:
    assert 0 < memory_limit().size_bytes <= RAM_BYTES
    assert cpu_model()


def test_folders(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0
    assert file_system_id(tmp_path) == file_system_id(tmp_path)
    has_direct_io(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(StorageError, match="choose"):
        free_bytes(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="choose"):
        has_direct_io(tmp_path / "nowhere")


def test_other_work_is_what_the_system_did_beside_this_process(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text("cpu 0 0 0 500 20 0 0 0\ncpu0 9 9 9 9 9\n")
    others = OtherWork(stat)
    others.begin()
    # A thousand seconds of work in far less than a second, none of it idle or waiting for a disk.
    stat.write_text(f"cpu {600 * ticks} 0 {400 * ticks} 900 30 0 0 0\n")
    assert others.num_processors() > 100
    stat.write_text("cpu 0 0 0 900000 900000 0 0 0\n")
    assert others.num_processors() == 0.0


def test_processes_of_the_same_job_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_work_with", set())
    ticks = os.sysconf("SC_CLK_TCK")

    def spent(all_s: int, job_s: int) -> None:
        (tmp_path / "stat").write_text(f"cpu {all_s * ticks} 0 0 500 20 0 0 0\n")
        (tmp_path / "7").mkdir(exist_ok=True)
        # The name may be anything, and 14 s in the kernel are of the process as well.
        of_process = f"7 (a) b) R {'0 ' * 10}{job_s * ticks} {14 * ticks} 0 0"
        (tmp_path / "7" / "stat").write_text(of_process)

    spent(100, 50)
    others = OtherWork(tmp_path / "stat")
    others.begin()
    spent(1100, 1050)
    assert others.num_processors() > 100
    works_with([7, 8])
    spent(100, 50)
    others.begin()
    spent(1100, 1050)
    assert others.num_processors() == 0.0
    (tmp_path / "7" / "stat").unlink()
    assert others.num_processors() > 100


def test_a_system_that_does_not_tell_has_no_other_work(tmp_path: Path) -> None:
    others = OtherWork(tmp_path / "missing")
    others.begin()
    assert others.num_processors() == 0.0
