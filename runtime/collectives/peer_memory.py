"""Peer memory: how ranks of one host exchange values by reading each other's memory, with one copy and no network.

Each rank has a board of 8-byte words in its own memory, which the others read as they read values: how many exchanges
it has offered, how many of the others' it has taken, and where the values of the newest ones lie. A word is written by
one aligned store after all that it speaks of, which x86 lets nobody see in another order; other processors are refused.
A count is in both halves of its word, so that one that was read while it changed is seen to be none. Counts begin anew
after 2^32, some weeks of small steps; what is on offer at a time differs by far less.
Values stay as they are until all have taken them, and who has left offers nothing: its token is looked at after each
read, so that what a process has given back, or another process with its number has, is never taken for values.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_TOKEN, _OFFERED, _TAKEN, _SLOTS = range(4)
"""Words of a board: what tells that it is this one, numbers of exchanges, and the first of the slots."""
_NUM_SLOTS = 64
"""Exchanges that may be on offer at a time; further ones wait."""
_SLOT = 2  # words of a slot: address and bytes
_WORD, _HALF = 8, 32  # bytes, bits
_COUNTS = 1 << _HALF
_SOON_S, _LATER_S, _LATE = 2e-5, 5e-4, 1 / 16
"""Between two looks at the others: the least, the most, and the share of what has passed, by which one comes late."""
_QUICK_LOOKS, _SHORT_S = 50, 6e-4
"""A wait begins with so many looks without a pause, some 0.3 ms, where the one before was about as short. [Empirical]
The shortest sleep takes 0.08 ms, as much as a copy of 256 KiB, and steps of small models wait a hundred times."""
_LOOK_S = 1.0
"""Between two looks whether the other ranks are still there."""
_PTRACER = 0x59616D61
"""Of ``prctl``, in ``linux/prctl.h``: whose descendants may read this process where Yama guards it."""

Waits = Callable[[float], bool]
"""Whether to wait on, after so many seconds."""


class _Span(ctypes.Structure):
    """The kernel's ``iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _GoneError(RuntimeError):
    """A rank has left, or its process has ended: it reads nothing any more."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a rank takes of what another has offered."""

    peer: int
    offered_bytes: int
    """All that it has to have offered, so that another exchange is found."""
    offset_bytes: int
    into: torch.Tensor
    """Dense memory, of which all is filled."""


@dataclass(slots=True)
class Reading:
    """An exchange under way: what this rank has offered, and what it has not yet taken."""

    number: int
    offered: torch.Tensor
    wants: list[Want]


@dataclass(frozen=True, slots=True)
class _Peer:
    pid: int
    board: int
    token: int


class PeerMemory:
    """One rank's board, and what it sees of the others'. They offer and take the same exchanges in the same order."""

    def __init__(self, rank: int) -> None:
        """Make an empty board."""
        self._rank = rank
        self._words = (ctypes.c_uint64 * (_SLOTS + _SLOT * _NUM_SLOTS))()
        self._words[_TOKEN] = secrets.randbits(63) + 1
        self._peers: dict[int, _Peer] = {}
        self._pending: deque[Reading] = deque()
        self.waited_s = 0.0
        """For the other ranks, so far, without what was copied meanwhile."""
        self._copied_s = 0.0
        self._has_core = False
        """Whether each rank has a processor: who looks without a pause takes none from whom it waits for."""
        self._is_short = True
        """Whether the last wait was."""
        # Others may look at it until this process ends.
        _boards.append(self._words)

    def told(self) -> str:
        """Return what the other ranks have to know, in words."""
        _let_siblings_read()
        machine = platform.machine()
        host = (
            f"{socket.gethostname()}/{machine if machine in ('x86_64', 'AMD64') else os.getpid()}"
        )
        return f"{os.getpid()} {ctypes.addressof(self._words)} {self._words[_TOKEN]} {host}"

    def finds(self, told: Sequence[str]) -> bool:
        """Return whether all ranks run on this host and their memory can be read, by what each has told."""
        own = told[self._rank].split(" ", 3)
        for rank, words in enumerate(told):
            pid, board, token, host = words.split(" ", 3)
            if host != own[3]:
                return False
            if rank != self._rank:
                peer = self._peers[rank] = _Peer(int(pid), int(board), int(token))
                if not self._is_there(peer):
                    return False
        self._has_core = len(told) <= len(os.sched_getaffinity(0))
        return True

    def offer(self, values: torch.Tensor, wants: Sequence[Want], waits: Waits) -> Reading:
        """Begin an exchange.

        Args:
            values: dense memory of which the others take what they want, and that stays as it is until then.
            wants: what this rank takes of the others' values, once they are there.
            waits: as for ``finish``.

        Raises:
            RuntimeError: a rank is gone, or offers something else.
        """
        number = self._words[_OFFERED] >> _HALF
        self._until(lambda: self._is_taken(number - _NUM_SLOTS), waits)
        slot = _SLOTS + _SLOT * (number % _NUM_SLOTS)
        self._words[slot] = values.data_ptr()
        self._words[slot + 1] = values.numel() * values.element_size()
        self._words[_OFFERED] = _in_both_halves(number + 1)
        reading = Reading(number, values, [want for want in wants if want.into.numel()])
        self._pending.append(reading)
        self._advance()
        return reading

    def take(self, reading: Reading, waits: Waits) -> None:
        """Wait until this rank has all that it wants of an exchange.

        Raises:
            RuntimeError: a rank is gone, or offers something else; or ``waits`` says so.
        """
        self._until(lambda: not reading.wants and reading not in self._pending, waits)

    def finish(self, reading: Reading, waits: Waits) -> None:
        """Wait until the others have what they want of this rank's values, too, which are free then.

        Raises:
            RuntimeError: as for ``take``.
        """
        self.take(reading, waits)
        self._until(lambda: self._is_taken(reading.number), waits)

    def leave(self) -> None:
        """Offer and take nothing any more; whoever still needs something finds this rank gone."""
        self._words[_TOKEN] = 0
        self._pending.clear()

    def _advance(self) -> None:
        """Take what is there, in the order of the exchanges."""
        while self._pending:
            reading = self._pending[0]
            reading.wants = [want for want in reading.wants if not self._took(reading.number, want)]
            if reading.wants:
                return
            self._pending.popleft()
            self._words[_TAKEN] = _in_both_halves(reading.number + 1)

    def _took(self, number: int, want: Want) -> bool:
        peer = self._peers[want.peer]
        if not _is_beyond(self._seen(peer)[_OFFERED], number):
            return False
        place = (ctypes.c_uint64 * _SLOT)()
        first = _SLOTS + _SLOT * (number % _NUM_SLOTS)
        _read(peer.pid, peer.board + _WORD * first, ctypes.addressof(place), _WORD * _SLOT)
        size_bytes = want.into.numel() * want.into.element_size()
        if place[1] != want.offered_bytes:
            raise RuntimeError(f"rank {want.peer} offers {place[1]} bytes, of another exchange")
        begin_s = time.monotonic()
        _read(peer.pid, place[0] + want.offset_bytes, want.into.data_ptr(), size_bytes)
        self._copied_s += time.monotonic() - begin_s
        self._seen(peer)
        return True

    def _seen(self, peer: _Peer) -> Sequence[int]:
        """Return the counts of a board, each at the place of its word.

        Raises:
            RuntimeError: the process has left, or is gone.
        """
        words = (ctypes.c_uint64 * _SLOTS)()
        while True:
            _read(peer.pid, peer.board, ctypes.addressof(words), _WORD * _SLOTS)
            if words[_TOKEN] != peer.token:
                raise _GoneError("a rank has left the exchange")
            if all(_in_both_halves(words[i] >> _HALF) == words[i] for i in (_OFFERED, _TAKEN)):
                return [word >> _HALF for word in words]

    def _is_there(self, peer: _Peer) -> bool:
        try:
            self._seen(peer)
        except RuntimeError:
            return False
        return True

    def _is_taken(self, number: int) -> bool:
        """Return whether no other rank needs this one's values of an exchange any more: who is gone reads nothing."""
        for peer in self._peers.values():
            try:
                if not _is_beyond(self._seen(peer)[_TAKEN], number):
                    return False
            except _GoneError:
                continue
        return True

    def _until(self, is_done: Callable[[], bool], waits: Waits) -> None:
        self._advance()
        if is_done():
            return
        begin_s = looked_s = time.monotonic()
        copied_s = self._copied_s
        quick_looks = _QUICK_LOOKS if self._has_core and self._is_short else 0
        try:
            while not is_done():
                now_s = time.monotonic()
                if now_s - looked_s > _LOOK_S:
                    looked_s = now_s
                    if not waits(now_s - begin_s):
                        raise RuntimeError("nothing comes any more")
                quick_looks -= 1
                if quick_looks < 0:
                    time.sleep(min(max((now_s - begin_s) * _LATE, _SOON_S), _LATER_S))
                self._advance()
        finally:
            passed_s = time.monotonic() - begin_s - (self._copied_s - copied_s)
            self._is_short = passed_s < _SHORT_S
            self.waited_s += passed_s


def _in_both_halves(count: int) -> int:
    return count % _COUNTS << _HALF | count % _COUNTS


def _is_beyond(count: int, number: int) -> bool:
    """Return whether a count of exchanges has the one of a number among them."""
    return 0 < (count - number) % _COUNTS < _COUNTS // 2


_boards: list[ctypes.Array[ctypes.c_uint64]] = []
_libc = ctypes.CDLL(None, use_errno=True)


def _read(pid: int, address: int, into: int, size_bytes: int) -> None:
    """Copy another process's memory.

    Raises:
        RuntimeError: it cannot be read.
    """
    while size_bytes:
        here, there = _Span(into, size_bytes), _Span(address, size_bytes)
        count = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            kind = _GoneError if code in (errno.ESRCH, errno.EFAULT) else RuntimeError
            raise kind(f"the memory of process {pid} cannot be read: {os.strerror(code)}")
        # The kernel copies two GiB at a time.
        address, into, size_bytes = address + count, into + count, size_bytes - count


if hasattr(_libc, "process_vm_readv"):
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    )


def _let_siblings_read() -> None:
    """Let what torchrun has started beside this process read it, where the kernel would let parents alone."""
    if (parent := os.getppid()) > 1:
        # Without Yama there is nothing to be let.
        _libc.prctl(_PTRACER, ctypes.c_ulong(parent), 0, 0, 0)
