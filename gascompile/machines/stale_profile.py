"""Runs that disprove the machine's numbers: a run is compared with its plan, and a wrong profile measured again.

No run beats the physical limit of its plan, so one that does shows that rates were measured too low, as on a
busy machine; likewise runs that take far from what was predicted. Such a profile is marked beside its file, and
whoever asks for this machine next, in any process, measures it anew, when others leave the processors idle and
at most once an hour. Presets, files and the emulated accelerator are the user's own: it is said, and no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.files import read_regular
from gascompile.core.plan import Plan
from gascompile.core.reports import UNLIKELY, RunReport
from gascompile.cost_models.measure.host import OtherWork

_log = logging.getLogger("gascompile")

SUFFIX = ".stale"
FAR = 3.0
"""So many times slower or faster than predicted is no spread, either."""
_SLOW_RUNS = 3
"""Slow runs in a row: the first also loads residents, and another may wait for a busy moment."""
_PAUSE_S = 3600.0
"""A machine that was measured so recently is not measured again: what is wrong is something else."""
_WORTH_S = 0.002
"""Of a run: below, what is measured is mostly the call itself."""
_WATCH_S = 0.25
"""For which others are watched: 25 ticks of the clock that the kernel counts their work by."""
_REASON_BYTES = 10_000
"""At most, of the line in a mark."""
_IDLE_PROCESSORS = 0.3
"""That others may keep busy: a desktop at rest keeps fewer. Chosen, not measured."""


class Grader:
    """Compares the runs of one plan with what was predicted; says so, and marks the profile, once."""

    def __init__(
        self,
        plan: Plan,
        profile: Callable[[], Path | None],
        *,
        saved_s: float = 0.0,
        waits: bool = False,
    ) -> None:
        """Take a way to the file of the profile behind the plan; ``None`` where it is not this machine's.

        Args:
            saved_s: what fused ops are predicted to save of a run, of which the plan does not know.
            waits: whether a run waits for what other machines do, so that it says nothing of this one's numbers.
        """
        certificate = plan.certificate
        self._limit_s = max(certificate.limit_s - saved_s, 0.0)
        self._predicted_s = max(certificate.predicted_s - saved_s, 0.0)
        self._fast_s = max(self._limit_s / UNLIKELY, self._predicted_s / FAR)
        self._profile = profile
        self._name = plan.workload.name
        self._num_slow = 0
        # Below that, what is measured is mostly the call itself.
        self._done = certificate.predicted_s < _WORTH_S or waits

    def grade(self, report: RunReport) -> bool:
        """Look at one run; two comparisons where nothing is wrong. Return whether it was said that something is."""
        if self._done or self._fast_s <= report.seconds <= self._predicted_s * FAR:
            self._num_slow = 0
            return False
        if report.seconds < self._limit_s / UNLIKELY:
            what = f"faster than its physical limit of {self._limit_s:.3g} s"
        elif report.seconds < self._fast_s:
            what = f"much faster than the {self._predicted_s:.3g} s predicted"
        else:
            self._num_slow += 1
            if self._num_slow < _SLOW_RUNS:
                return False
            what = f"much slower than the {self._predicted_s:.3g} s predicted, {_SLOW_RUNS} times in a row"
        self._done = True
        profile = self._profile()
        follows = "correct them, or measure this machine: gascompile calibrate"
        if profile is not None and mark(profile, what):
            follows = "this machine is measured again before the next plan"
        _log.warning(
            "a run of %s took %.3g s, %s: the numbers of the machine are wrong; %s",
            self._name,
            report.seconds,
            what,
            follows,
        )
        return True


def mark(profile: Path, reason: str) -> bool:
    """Mark a profile as disproved; return whether it will be measured again for that."""
    try:
        if time.time() - profile.stat().st_mtime < _PAUSE_S:
            return False
        serial.write_atomic(profile.with_suffix(SUFFIX), reason + "\n")
    except (OSError, StorageError):
        # Without its file there is nothing to forget, and a folder that cannot be written keeps it.
        return False
    return True


def is_stale(profile: Path) -> bool:
    """Whether a profile was disproved after it was measured, and the machine is idle enough to measure it again."""
    stale = profile.with_suffix(SUFFIX)
    try:
        disproved = stale.stat().st_mtime > profile.stat().st_mtime
        old = time.time() - profile.stat().st_mtime >= _PAUSE_S
    except OSError:
        return False
    if not (disproved and old):
        return False
    others = OtherWork()
    others.begin()
    time.sleep(_WATCH_S)
    if (count := others.num_processors()) > _IDLE_PROCESSORS:
        _log.warning(
            "a run disproved the numbers of this machine (%s), but others keep %.1f processors busy: it is measured "
            "again when they do not",
            _reason(stale),
            count,
        )
        return False
    _log.warning("this machine is measured again: a run was %s", _reason(stale))
    return True


def _reason(stale: Path) -> str:
    try:
        return read_regular(stale, max_bytes=_REASON_BYTES).decode().strip()
    except (StorageError, FormatError, ValueError):
        return "far from its prediction"
