"""What the operating system says about this host: memory limit, processor, free space, direct I/O.

Plain reads of system files and calls; nothing here is timed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gascompile.core.errors import StorageError
from gascompile.core.sizes import PAGE_BYTES

_IDLE_FIELDS = slice(3, 5)
"""Ticks in ``/proc/stat`` that the processors spent on nothing: idle, and waiting for a disk."""
_OF_PROCESS = slice(11, 13)
"""Ticks that a process spent for itself and in the kernel, behind its name in its ``stat``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Bytes that this process may use at most, and what sets that number."""

    size_bytes: int
    origin: str
    """``physical RAM`` or the control group's file."""


def memory_limit(
    *, cgroup_list: Path = Path("/proc/self/cgroup"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> MemoryLimit:
    """Return the smallest of physical memory and every enclosing control group's limit (v1 and v2)."""
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    best = MemoryLimit(size_bytes=ram_bytes, origin="physical RAM")
    for path in _cgroup_limit_files(cgroup_list, cgroup_root):
        text = _read_text(path).strip()
        if text.isdigit() and int(text) < best.size_bytes:
            best = MemoryLimit(size_bytes=int(text), origin=str(path))
    return best


def _cgroup_limit_files(cgroup_list: Path, cgroup_root: Path) -> list[Path]:
    files: list[Path] = []
    for line in _read_text(cgroup_list).splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            base, name = cgroup_root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = cgroup_root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the group's path may not exist below the mount; the mount itself does.
        folder = base / group.strip("/")
        files += [
            parent / name
            for parent in (folder, *folder.parents)
            if base in (parent, *parent.parents)
        ]
    return files


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        # A missing file is the ordinary sign that this kind of control group is not in use.
        return ""


_work_with: set[int] = set()


def works_with(processes: Iterable[int]) -> None:
    """Take it from here on that processes of this host, by their numbers, do this one's job: they are not others."""
    _work_with.update(number for number in processes if number != os.getpid())


@dataclass(slots=True)
class OtherWork:
    """How many processors other processes keep busy while something is measured, without those of the same job."""

    stat: Path = Path("/proc/stat")
    _start: tuple[float, float] = (0.0, 0.0)
    _own_s: Mapping[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Start to watch."""
        self._start, self._own_s = (self._busy_s(), time.perf_counter()), self._used_s()

    def num_processors(self) -> float:
        """Return the processors that others kept busy since ``begin``; 0 where the system does not tell."""
        now = self._busy_s(), time.perf_counter()
        busy_s, wall_s = (after - before for after, before in zip(now, self._start, strict=True))
        # A process that has ended meanwhile tells nothing of what it did.
        own_s = sum(used_s - self._own_s.get(n, used_s) for n, used_s in self._used_s().items())
        return max(busy_s - own_s, 0.0) / wall_s if busy_s and wall_s else 0.0

    def _busy_s(self) -> float:
        ticks = [float(text) for text in _read_text(self.stat).partition("\n")[0].split()[1:]]
        if len(ticks) < _IDLE_FIELDS.stop:
            return 0.0
        return (sum(ticks) - sum(ticks[_IDLE_FIELDS])) / os.sysconf("SC_CLK_TCK")

    def _used_s(self) -> dict[int, float]:
        """Return what each process of this job has used of processors so far."""
        used_s = {os.getpid(): time.process_time()}
        for number in _work_with:
            fields = _read_text(self.stat.parent / str(number) / "stat").rpartition(")")[2].split()
            if fields:
                used_s[number] = sum(map(float, fields[_OF_PROCESS])) / os.sysconf("SC_CLK_TCK")
        return used_s


def cpu_model() -> str:
    """Return the processor's name, or its architecture where the system does not tell."""
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model", "cpu model"}:
            return value.strip()
    return os.uname().machine


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the space that this user may still take on the file system of ``folder``."""
    try:
        stats = os.statvfs(folder)
    except OSError as error:
        raise StorageError(
            f"cannot look at {os.fspath(folder)}: {error.strerror}; choose a folder that exists"
        ) from error
    return stats.f_bavail * stats.f_frsize


def capacity_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the size of the file system of ``folder``; unlike its free space it does not change."""
    stats = os.statvfs(folder)
    return stats.f_blocks * stats.f_frsize


def file_system_id(folder: str | os.PathLike[str]) -> str:
    """Return a text that tells file systems apart and stays the same across restarts where it can."""
    stats = os.statvfs(folder)
    return f"{stats.f_fsid:x}" if stats.f_fsid else f"dev-{os.stat(folder).st_dev:x}"


def has_direct_io(folder: str | os.PathLike[str]) -> bool:
    """Return whether an ``O_DIRECT`` write to a temporary file in ``folder`` works.

    Raises:
        StorageError: no file can be made in the folder at all.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".gascompile-direct-")
    except OSError as error:
        raise StorageError(
            f"cannot make a file in {os.fspath(folder)}: {error.strerror}; choose another folder"
        ) from error
    os.close(descriptor)
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return False
    else:
        return _writes_a_page(descriptor)
    finally:
        Path(name).unlink(missing_ok=True)


def _writes_a_page(descriptor: int) -> bool:
    # Anonymous maps start at a page boundary, as direct I/O asks of its buffers.
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            return os.pwrite(descriptor, page, 0) == PAGE_BYTES
        except OSError:
            return False
        finally:
            os.close(descriptor)


def machine_name() -> str:
    """Return the name that this machine's measurement carries: processor and torch's threads."""
    return f"this machine: {cpu_model()}, {torch.get_num_threads()} threads"
