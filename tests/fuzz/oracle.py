"""What must never happen while a file is read, and a watch over it that sees what Python and torch do."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.mutate import CANARIES

MAX_PEAK_BYTES = 1 << 30
MAX_TIME_S = 2.0
"""Of processor time: a machine that is busy with other things takes longer by the clock."""
_HANG_S = 60
_FORBIDDEN = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.kill", "os.putenv",
    "socket.connect", "socket.bind", "shutil.rmtree", "os.remove", "os.rename", "os.chmod", "os.symlink", "os.link",
)  # fmt: skip
_READABLE = (
    "/proc/",
    "/sys/",
    "/dev/shm/",
    "/dev/null",
    "/dev/urandom",
    "/etc/localtime",
    "/usr/",
    "/lib",
)


class Watch:
    """Collects what is forbidden between ``begin`` and ``end``; hooks of Python's cannot be taken off again."""

    def __init__(self, folder: Path) -> None:
        self._folders = (f"{folder}/",)
        roots = {Path(path).resolve() for path in sys.path if path}
        self._readable = (*_READABLE, *(f"{root}/" for root in roots), sys.base_prefix, sys.prefix)
        self._active = False
        self.found: list[str] = []
        sys.addaudithook(self._hook)

    def allow(self, folder: Path) -> None:
        """Let what lies below ``folder`` be read."""
        self._readable = (*self._readable, f"{folder}/")

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event in _FORBIDDEN and not self._inside(args):
            self.found.append(f"{event} {args!r:.200}")
        elif event == "import" and str(args[0]).startswith(
            tuple(c.split(".")[0] for c in CANARIES)
        ):
            self.found.append(f"import {args[0]}")
        elif event == "open" and isinstance(args[0], (str, bytes)):
            self._check_open(os.fsdecode(args[0]), args[2])

    def _inside(self, args: tuple[Any, ...]) -> bool:
        return (
            bool(args)
            and isinstance(args[0], (str, os.PathLike))
            and str(args[0]).startswith(self._folders)
        )

    def _check_open(self, path: str, flags: int) -> None:
        inside = path.startswith(self._folders)
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not inside and not path.startswith(("/dev/shm/", "/proc/self/", "/dev/null")):
            self.found.append(f"writes {path[:200]}")
        elif not inside and path.startswith("/") and not path.startswith(self._readable):
            self.found.append(f"reads {path[:200]}")

    @contextmanager
    def case(self) -> Iterator[None]:
        """Watch one case; afterwards ``found`` says what it did that it must not."""
        self.found = []
        _forget_peak()
        before_bytes, before_s = _peak_bytes(), time.process_time()
        signal.signal(signal.SIGALRM, _hang)
        signal.alarm(_HANG_S)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            signal.alarm(0)
            taken_s, grown = time.process_time() - before_s, _peak_bytes() - before_bytes
            if taken_s > MAX_TIME_S:
                self.found.append(f"took {taken_s:.1f} s")
            if grown > MAX_PEAK_BYTES:
                self.found.append(f"took {grown >> 20} MiB")


class Hang(BaseException):
    """A case did not end."""


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def limit_memory(more_bytes: int = 3 << 30) -> None:
    """Have what asks for much more memory than a case may take fail in this process, and not the machine."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
