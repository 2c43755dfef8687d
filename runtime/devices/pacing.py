"""When the copies of emulated links begin and end: bandwidths and latencies of a machine, kept on average.

A transfer is planned when it is asked for, from the end of the one before it and not from when a thread woke
up: late wake-ups do not add up, and who is served first does not hang on them. Links that share a pipe share its
bandwidth: a pipe admits a transfer when the bytes of the one before would have passed at its own rate.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gascompile.core.machine import Machine

_OVERSLEPT_S = 120e-6
"""How much longer than asked for a thread may sleep: the last of a wait is spent looking at the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disorder:
    """Delays that no plan can know of: each copy starts up to so many seconds later than it could.

    Copies of one link stay in their order, as on a real stream; those of different links overtake each other.
    """

    seed: int
    longest_delay_s: float


class Pacing:
    """The time table of all links of a machine: theirs alone, who else wants an entry asks for it."""

    def __init__(self, machine: Machine, disorder: Disorder | None = None) -> None:
        self._links = {link.name: link for link in machine.links}
        self._pipe_rates = {pipe.name: pipe.bandwidth_bytes_per_s for pipe in machine.pipes}
        self._link_free_s: dict[str, float] = {}
        self._pipe_free_s: dict[str, float] = {}
        self._lock = threading.RLock()
        """Of the links' own threads; the calling thread takes it nowhere."""
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._disorder = disorder
        self._random = random.Random(disorder.seed if disorder else 0)

    def __contains__(self, link: str) -> bool:
        return link in self._links

    def ask(self, entry: Callable[[], None]) -> None:
        """Let ``entry`` be called, by the thread of a link, after all that were asked for before."""
        self._asked.put(entry)

    def enter_asked(self) -> None:
        """Enter what was asked for so far; for the threads of links."""
        with self._lock:
            while not self._asked.empty():
                self._asked.get()()

    def delay_s(self) -> float:
        """Return how long the next copy is held back."""
        if self._disorder is None:
            return 0.0
        with self._lock:
            # Most copies are quick, some are very late: that mixes orders more than even delays do.
            return self._disorder.longest_delay_s * self._random.random() ** 4

    @property
    def is_disturbed(self) -> bool:
        """Whether copies are held back."""
        return self._disorder is not None

    @property
    def num_asked(self) -> int:
        """Entries that no thread of a link has made yet."""
        return self._asked.qsize()

    def begin_s(self, link: str, size_bytes: int, ready_s: float) -> float:
        """Plan a transfer and return when its first byte passes, on the clock of ``time.perf_counter``.

        Transfers have links and pipes in the order in which they are planned.

        Args:
            link: what it goes over.
            size_bytes: of the transfer.
            ready_s: when it could begin, were the link free.
        """
        spec = self._links[link]
        with self._lock:
            free_s = [self._pipe_free_s.get(pipe, 0.0) for pipe in spec.shared]
            start_s = max(ready_s, self._link_free_s.get(link, 0.0), *free_s)
            first_s = start_s + spec.latency_s
            self._link_free_s[link] = first_s + size_bytes / spec.bandwidth_bytes_per_s
            for pipe in spec.shared:
                if pipe in self._pipe_rates:
                    passed_s = spec.pipe_bytes(size_bytes) / self._pipe_rates[pipe]
                    self._pipe_free_s[pipe] = start_s + passed_s
            return first_s

    def take(self, link: str, size_bytes: int, ready_s: float) -> None:
        """Enter a transfer that goes beside what its link is at; what comes later has the less of the link."""
        spec = self._links[link]
        with self._lock:
            free_s = max(ready_s, self._link_free_s.get(link, 0.0))
            self._link_free_s[link] = free_s + size_bytes / spec.bandwidth_bytes_per_s

    def latency_s(self, link: str) -> float:
        """Return what a link takes before the first byte of a transfer passes."""
        return self._links[link].latency_s

    def give_back(self, link: str, time_s: float) -> None:
        """Note that so many planned seconds of a link are not used."""
        with self._lock:
            self._link_free_s[link] -= time_s
            for pipe in self._links[link].shared:
                # No pipe is busy for longer than all of its links.
                ends_s = (
                    end_s
                    for name, end_s in self._link_free_s.items()
                    if pipe in self._links[name].shared
                )
                if pipe in self._pipe_free_s:
                    self._pipe_free_s[pipe] = min(self._pipe_free_s[pipe], max(ends_s))

    def seconds(self, link: str, size_bytes: int) -> float:
        """Return how long so many bytes take to pass."""
        return size_bytes / self._links[link].bandwidth_bytes_per_s


def sleep_until(end_s: float) -> None:
    """Block until ``time.perf_counter`` says ``end_s``, to a few microseconds."""
    while (left_s := end_s - time.perf_counter()) > 0:
        time.sleep(max(left_s - _OVERSLEPT_S, 0.0))
