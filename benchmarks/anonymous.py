"""The peak of this process's anonymous memory, which is what it cannot give back without swapping.

Pages of files are left out: the kernel drops them when it wants their memory, so their number says how much
was free and not how much was needed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

_STATUS = Path("/proc/self/status")
_COUNTED = ("RssAnon:", "RssShmem:")
_MAPPED = (*_COUNTED, "RssFile:")
PERIOD_S = 0.02


def anonymous_bytes(counted: tuple[str, ...] = _COUNTED) -> int:
    """Return the resident bytes of this process that no file backs, shared memory included."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(counted))


class PeakSampler:
    """Samples ``anonymous_bytes`` in a thread while the ``with`` block runs.

    A peak that is shorter than ``PERIOD_S`` may be missed. With ``files``, resident pages of mapped files count, too.
    """

    def __init__(self, *, files: bool = False) -> None:
        self._counted = _MAPPED if files else _COUNTED
        self._peak_bytes = 0
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="peak-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join()

    def take_peak_bytes(self) -> int:
        """Return the largest sample since the last call, one taken now included, and begin anew."""
        self._sample()
        with self._lock:
            peak_bytes, self._peak_bytes = self._peak_bytes, 0
        return peak_bytes

    def _sample(self) -> None:
        now_bytes = anonymous_bytes(self._counted)
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, now_bytes)

    def _run(self) -> None:
        while not self._done.wait(PERIOD_S):
            self._sample()
