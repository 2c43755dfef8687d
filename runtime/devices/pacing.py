"""When the copies of emulated links begin and end: bandwidths and latencies of a machine, kept on average.

A copy's end is planned when it begins, from the end of the one before it and not from when a thread woke
up: late wake-ups do not add up. Links that share a pipe share its bandwidth: a pipe admits a copy when the
bytes of the one before would have passed at its own rate.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from gascompile.ir import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Disorder:
    """Delays that no plan can know of: each copy starts up to so many seconds later than it could.

    Copies of one link stay in their order, as on a real stream; those of different links overtake each other.
    """

    seed: int
    longest_delay_s: float


class Pacing:
    """The time table of all links of a machine; for threads."""

    def __init__(self, machine: Machine, disorder: Disorder | None = None) -> None:
        self._links = {link.name: link for link in machine.links}
        self._pipe_rates = {pipe.name: pipe.bandwidth_bytes_per_s for pipe in machine.pipes}
        self._link_free_s: dict[str, float] = {}
        self._pipe_free_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._disorder = disorder
        self._random = random.Random(disorder.seed if disorder else 0)

    def __contains__(self, link: str) -> bool:
        return link in self._links

    def delay_s(self) -> float:
        """Return how long the next copy is held back."""
        if self._disorder is None:
            return 0.0
        with self._lock:
            # Most copies are quick, some are very late: that mixes orders more than even delays do.
            return self._disorder.longest_delay_s * self._random.random() ** 4

    def end_s(self, link: str, size_bytes: int, ready_s: float, *, opens: bool) -> float:
        """Plan a copy and return when it ends, on the clock of ``time.perf_counter``.

        Args:
            link: what it goes over.
            size_bytes: of the copy.
            ready_s: when it could begin, were the link free.
            opens: the latency of the link counts.
        """
        spec = self._links[link]
        latency_s = spec.latency_s if opens else 0.0
        with self._lock:
            free_s = [self._pipe_free_s.get(pipe, 0.0) for pipe in spec.shared]
            start_s = max(ready_s, self._link_free_s.get(link, 0.0), *free_s)
            end_s = start_s + latency_s + size_bytes / spec.bandwidth_bytes_per_s
            self._link_free_s[link] = end_s
            for pipe in spec.shared:
                if pipe in self._pipe_rates:
                    self._pipe_free_s[pipe] = start_s + size_bytes / self._pipe_rates[pipe]
            return end_s


def sleep_until(end_s: float) -> None:
    """Block until ``time.perf_counter`` says ``end_s``."""
    while (left_s := end_s - time.perf_counter()) > 0:
        time.sleep(left_s)
