"""Local ranks: processes of one host that run the same calls, and what they tell each other through shared memory.

Each writes to its own row of a block of 8-byte words and reads the rows of all. A word is written by one aligned
store after all that it speaks of: x86 keeps stores, and loads, in their order, and nothing else is relied on. So a
word that has grown says that what its writer did before can be seen. Other processors need barriers that Python does
not have, and are refused.

Ranks meet before they do anything that all have to do, and say what it is: who is about to do something else is
found. A rank that fails says so in its row, and whoever waits for it raises. The next call of all is not affected.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gascompile.core import patience
from gascompile.core.errors import RankError, RankMismatchError, UnsupportedOpError
from gascompile.core.waiting import life, require_life

_TURN, _FAILED, _OF, _CLOSED, _DROPPED, _SUBMITTED, _HANDLE, _NUM_BYTES, _INODE, _SAID = range(10)
"""Words of a row: the last meeting; the call that failed, and the rank it failed for; closed models; the last
memory that is used no more; loads asked for; the memory at hand: descriptor, size, inode; bytes of the reason of a
failure."""
_FACTS, _NUMBERS = 2, 4
_SLOT = 1 + _FACTS + _NUMBERS
_SLOTS = 10
"""First of four slots for what a meeting is about: ranks may be in two calls at once, and in two meetings of each."""
_REASON, _REASON_BYTES = _SLOTS + 4 * _SLOT, 1024
_RING = _REASON + _REASON_BYTES // 8
NUM_FLAGS = 4096
"""Of loads that were delivered, in a ring."""
_ROW = _RING + NUM_FLAGS
_CALL = 1 << 20
"""A call has fewer meetings."""

MEET_S = 1800.0
"""How long ranks wait for each other outside of runs, where one may load data or plan; torch's own default."""
SILENT_S = 20.0
"""A rank of whose run nothing comes for so long, and three of its predicted runs more, is given up."""
OWN_S = 15.0
"""As ``SILENT_S``, for a rank's own drive: sooner, so that the others hear of it."""
_STOPPED_S = 5.0
"""A rank that is stopped for longer is given up."""
_LOOK_S = 0.05
"""Between two looks whether the other processes run: a look takes 20 us for each."""
_SOON_S, _LATER_S = 5e-5, 1e-3
"""Between two looks at words, at first and at most: a tenth of what was waited so far."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this host, told from others that get its number later."""

    number: int
    began: int

    @staticmethod
    def here() -> Process:
        """Return this one."""
        return Process(os.getpid(), int(_stat(os.getpid())[19]))

    @property
    def state(self) -> str:
        """The kernel's letter for what it is doing; ``X`` if it is gone."""
        try:
            fields = _stat(self.number)
        except OSError:
            return "X"
        return fields[0] if int(fields[19]) == self.began else "X"


def _stat(number: int) -> list[str]:
    with open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()


def block_bytes(num_ranks: int) -> int:
    """Return the size of the block of so many ranks."""
    return 8 * _ROW * num_ranks


class LocalRanks:
    """This process among the ranks of its host."""

    def __init__(
        self,
        rank: int,
        block: mmap.mmap,
        processes: Sequence[Process],
        names: Sequence[int],
    ) -> None:
        """Use a block that all have mapped, at first all zeros.

        Args:
            rank: which of ``processes`` this one is.
            block: of ``block_bytes``.
            processes: of all ranks of this host, in their order.
            names: their numbers in the job, for messages.

        Raises:
            UnsupportedOpError: this processor may show stores out of order.
        """
        if platform.machine() not in ("x86_64", "AMD64"):
            raise UnsupportedOpError(
                f"ranks of one host share memory on x86 alone, not on {platform.machine()}; pass mesh=False, so that "
                "each rank runs for itself"
            )
        self.rank, self.size, self.names = rank, len(processes), tuple(names)
        self.processes = tuple(processes)
        self._words = memoryview(block).cast("q")
        self._bytes = memoryview(block)
        self._starts = [_ROW * other for other in range(self.size)]
        self._own = _ROW * rank
        self._call = self._index = 0
        self.num_memories = 0
        """That ranks have opened so far; a rank that fails to open one is back in step by the next."""
        self._life = life()
        self._stopped_s: dict[int, float] = {}
        self.silent_s = SILENT_S

    # ------------------------------------------------------------ calls and meetings

    def begin(self) -> None:
        """Begin a call; all ranks make the same ones in the same order.

        Raises:
            ForkedError: this is a child of the process that met the others.
        """
        require_life(self._life, "what several ranks run")
        self._call += 1
        self._index = 0

    def meet(
        self, what: str, facts: bytes | str = b"", numbers: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return each rank's ``numbers``, once all ranks are here with the same facts.

        Args:
            what: the facts are of, for messages.
            facts: equal on all ranks.
            numbers: of this rank, four at most.

        Raises:
            RankError: a rank has failed, is gone, or has closed its model.
            RankMismatchError: ranks differ; on all of them.
        """
        text = facts.encode() if isinstance(facts, str) else facts
        digest = hashlib.blake2b(what.encode() + b"\0" + text, digest_size=8 * _FACTS).digest()
        self._index += 1
        turn = self._call * _CALL + self._index
        slot = _SLOTS + _SLOT * (2 * (self._call % 2) + self._index % 2)
        own = self._own + slot
        padded = [*numbers, *[0] * (_NUMBERS - len(numbers))]
        self._words[own] = turn
        for i in range(_FACTS):
            word = int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True)
            self._words[own + 1 + i] = word
        for i, number in enumerate(padded):
            self._words[own + 1 + _FACTS + i] = number
        self._words[self._own + _TURN] = turn

        def missing() -> int:
            words = self._words
            return next((r for r, at in enumerate(self._starts) if words[at + _TURN] < turn), -1)

        self.wait(missing, MEET_S)
        table = [list(self._words[at + slot : at + slot + _SLOT]) for at in self._starts]
        facts_of = [row[: 1 + _FACTS] for row in table]
        if others := [r for r, of_rank in enumerate(facts_of) if of_rank != facts_of[0]]:
            if any(of_rank[0] != turn for of_rank in facts_of):
                # It has failed, and makes its next call.
                self._raise_failure()
            named = ", ".join(str(self.names[other]) for other in others)
            raise RankMismatchError(
                f"rank {named} and rank {self.names[0]} differ in {what}, where rank {self.names[self.rank]} is: every "
                "rank has to compile the same model and to call it in the same order with inputs of the same shapes; "
                "only their values are its own",
                rank=self.names[others[0]],
            )
        return [row[1 + _FACTS : 1 + _FACTS + len(numbers)] for row in table]

    def wait(self, missing: Callable[[], int], silent_s: float | None = None) -> None:
        """Block until ``missing`` names no rank any more, but returns -1.

        Args:
            missing: the first rank that has not done what is waited for.
            silent_s: a rank that writes nothing for so long is given up; by default what ``expect`` says.

        Raises:
            RankError: a rank has failed in this call, is gone, or is silent.
            StorageError: this rank's own drive is.
        """
        begin_s = look_s = heard_s = time.monotonic()
        limit_s = self.silent_s if silent_s is None else silent_s
        heard: tuple[int, ...] = ()
        watch = patience.Watch("this rank's part of a weight")
        while (rank := missing()) >= 0:
            # What is missing may have come between, and then its rank may have failed at something later.
            if self._failure() is not None and missing() >= 0:
                self._raise_failure()
            now_s = time.monotonic()
            if now_s - look_s >= _LOOK_S:
                look_s = now_s
                self._require_running()
                if rank == self.rank:
                    watch()
                at = self._starts[rank]
                said = (rank, self._words[at + _TURN], self._words[at + _SUBMITTED])
                if said != heard:
                    heard, heard_s = said, now_s
                if now_s - heard_s > limit_s and rank != self.rank:
                    name = self.names[rank]
                    raise RankError(
                        f"nothing has come from rank {name} for {limit_s:.0f} s, for which rank "
                        f"{self.names[self.rank]} waits: it hangs, or makes fewer calls",
                        rank=name,
                    )
            passed_s = now_s - begin_s
            time.sleep(min(max(passed_s / 10, _SOON_S), _LATER_S))

    def expect(self, time_s: float) -> None:
        """Give a rank up that is silent for ``SILENT_S`` and three times ``time_s`` in a run."""
        self.silent_s = SILENT_S + 3 * time_s
        patience.limit(self, OWN_S + 3 * time_s)

    # ------------------------------------------------------------ ranks that fail

    def fail(self, error: BaseException) -> None:
        """Let the others know that this rank's call has failed, so that none waits for the rest of it."""
        if self._life is not life():
            return
        own, name = self._own, self.names[self.rank]
        about = error.rank if isinstance(error, RankError) and error.rank >= 0 else name
        said = str(error) if about != name else f"{type(error).__name__}: {error}"
        raw = said.encode(errors="replace")[:_REASON_BYTES]
        start = 8 * (own + _REASON)
        self._bytes[start : start + len(raw)] = raw
        self._words[own + _SAID] = len(raw)
        self._words[own + _OF] = about
        self._words[own + _FAILED] = self._call + 1

    def close(self) -> None:
        """Let the others know that this rank's model is closed: a call of theirs would wait for this rank."""
        patience.lift(self)
        if self._life is life():
            self._words[self._own + _CLOSED] += 1

    def _failure(self) -> int | None:
        """Return a rank that has failed in this call: who failed for itself comes first."""
        words = self._words
        at_own = words[self._own + _CLOSED]
        failed = [
            rank
            for rank, at in enumerate(self._starts)
            if rank != self.rank
            and (words[at + _FAILED] > self._call or words[at + _CLOSED] > at_own)
        ]
        own = (r for r in failed if words[self._starts[r] + _OF] == self.names[r])
        return next(own, failed[0]) if failed else None

    def _raise_failure(self) -> None:
        """Raise what a rank has said that has failed in this call."""
        if (rank := self._failure()) is None:
            return
        at, name = self._starts[rank], self.names[rank]
        if self._words[at + _FAILED] <= self._call:
            raise RankError(
                f"rank {name} has closed the model, and this is a call of rank {self.names[self.rank]}: every rank "
                "has to make the same calls",
                rank=name,
            )
        about = self._words[at + _OF]
        start = 8 * (at + _REASON)
        said = bytes(self._bytes[start : start + self._words[at + _SAID]]).decode(errors="replace")
        if about != name:
            raise RankError(said, rank=about)
        raise RankError(
            f"rank {name} has failed: {said}. This call has ended on all ranks of the host; mend the cause, and let "
            "all call again",
            rank=name,
        )

    def _require_running(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank == self.rank:
                continue
            state, now_s = process.state, time.monotonic()
            if state != "T":
                self._stopped_s.pop(rank, None)
            since_s = self._stopped_s.setdefault(rank, now_s) if state == "T" else now_s
            if state in "ZX" or now_s - since_s > _STOPPED_S:
                name = self.names[rank]
                raise RankError(
                    f"rank {name} is {'stopped' if state == 'T' else 'gone'}: this is rank {self.names[self.rank]} of "
                    "the same host, and waits for it. Start the job again; torchrun --max-restarts does so",
                    rank=name,
                )

    # ------------------------------------------------------------ memory and bytes of all

    def memory(self, size_bytes: int) -> mmap.mmap:
        """Return new memory that all ranks map, of zeros; all ask for it at once.

        Raises:
            RankError: it cannot be mapped.
        """
        return self._handed("the size of the shared memory", size_bytes, None)

    def from_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Return what ``make`` returns on rank 0; the others wait, and do not call it."""
        made = make() if self.rank == 0 else None
        memory = self._handed(what, 0, made)
        content = memory[:]
        memory.close()
        return content

    def _handed(self, what: str, size_bytes: int, content: bytes | None) -> mmap.mmap:
        words, first, handle = self._words, self._starts[0], -1
        try:
            if self.rank == 0:
                handle = os.memfd_create("gascompile")
                os.ftruncate(handle, max(size_bytes, len(content or b""), 1))
                if content:
                    os.pwrite(handle, content, 0)
                stat = os.fstat(handle)
                words[first + _HANDLE], words[first + _INODE] = handle, stat.st_ino
                words[first + _NUM_BYTES] = stat.st_size
            told = self.meet(what, str(size_bytes), (self.num_memories,))
            self.num_memories = 1 + max(count for (count,) in told)
            if self.rank != 0:
                handle = open_handed(
                    self.processes[0].number, words[first + _HANDLE], words[first + _INODE]
                )
            memory = mmap.mmap(handle, words[first + _NUM_BYTES])
            # From here on rank 0 may close its descriptor.
            self.meet("mapped memory")
            return memory
        except OSError as error:
            raise RankError(
                f"memory of {size_bytes} bytes cannot be shared between the ranks of this host: {error}",
                rank=self.names[self.rank],
            ) from error
        finally:
            if handle >= 0:
                os.close(handle)

    def drop_memory(self, number: int) -> bool:
        """Note that this rank uses memories up to ``number`` no more; return whether no rank does."""
        if self._life is not life():
            return False
        words = self._words
        words[self._own + _DROPPED] = max(number, words[self._own + _DROPPED])
        return all(words[at + _DROPPED] >= number for at in self._starts)

    # ------------------------------------------------------------ loads

    def first_load(self) -> int:
        """Return the number of the next load, once nothing is under way on any rank: all ask at once."""
        counts = self.meet("loads", numbers=(self._words[self._own + _SUBMITTED],))
        self.submit(first := max(count for (count,) in counts))
        return first

    @property
    def num_submitted(self) -> int:
        """Loads that all ranks have asked for: what those before had in their place is not used any more."""
        words = self._words
        return min(words[at + _SUBMITTED] for at in self._starts)

    def submit(self, count: int) -> None:
        """Note that this rank has asked for so many loads so far."""
        self._words[self._own + _SUBMITTED] = count

    def deliver(self, number: int) -> None:
        """Note that this rank's part of a load is in memory; those ``NUM_FLAGS`` before it have been by then."""
        self._words[self._own + _RING + number % NUM_FLAGS] = number + 1

    def missing(self, number: int) -> int:
        """Return a rank whose part of a load is not there yet, or -1."""
        words, flag = self._words, _RING + number % NUM_FLAGS
        return next((r for r, at in enumerate(self._starts) if words[at + flag] <= number), -1)


def open_handed(process: int, descriptor: int, inode: int) -> int:
    """Open what another process of this user has open.

    Raises:
        OSError: it cannot be opened, or is something else: the process runs in another container.
    """
    handle = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(handle).st_ino != inode:
        os.close(handle)
        raise OSError(f"process {process} is in another container")
    return handle
