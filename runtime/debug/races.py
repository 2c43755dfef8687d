"""Finds accesses that nothing orders, by vector clocks: which of two came first must follow from events.

Every stream and every thread of the host counts its own accesses, and knows how far each other had come at
the last event that it took note of. Two accesses to the same bytes, one of them a write, are a race unless
the later one's clock has seen the earlier one. So it does not matter which was faster this time: a missing
wait shows in the first run, with the op, the tensor and the address.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from gascompile.core.errors import RaceError

COMPUTE = "compute"

Clock = Mapping[str, int]
"""Per stream or thread how many of its accesses are known to be over."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that one stream touched."""

    start: int
    stop: int
    stream: str
    count: int
    """How many accesses the stream had made by then, this one included."""
    writes: bool
    what: str
    tensor: str


class Races:
    """The clocks, and the latest accesses to all memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: dict[str, dict[str, int]] = {}
        self._accesses: list[Access] = []
        self._places: dict[str, tuple[int, int]] = {}
        self.num_checked = 0
        """Accesses checked so far."""

    def place(self, name: str, memory: torch.Tensor) -> None:
        """Call the bytes of ``memory`` by ``name`` and an offset in messages; compute's reads of them are kept."""
        with self._lock:
            start = memory.data_ptr()
            self._places[name] = (start, start + memory.nbytes)

    def mark(self, stream: str) -> Clock:
        """Return the clock of an event that ``stream`` gets to after all it has been given so far."""
        with self._lock:
            return dict(self._clock(stream))

    def join(self, stream: str, clock: Clock) -> None:
        """Take note that ``stream`` goes on only after the event of ``clock``."""
        with self._lock:
            _merge(self._clock(stream), clock)

    def join_all(self, stream: str) -> None:
        """Take note that ``stream`` goes on only after everything that is under way."""
        with self._lock:
            for clock in list(self._clocks.values()):
                _merge(self._clock(stream), clock)

    def access(
        self, stream: str, tensor: torch.Tensor, *, writes: bool, name: str, what: str
    ) -> None:
        """Take note that ``stream`` reads or writes the bytes of ``tensor``, given to it by this thread.

        Args:
            stream: who does.
            tensor: its bytes.
            writes: whether it writes them.
            name: of the tensor in the plan.
            what: who and why, for messages: ``op 'linear'``.

        Raises:
            RaceError: another stream touches some of them, and nothing orders the two.
        """
        start, stop = _extent(tensor)
        if start == stop:
            return
        with self._lock:
            self.num_checked += 1
            clock = self._clock(stream)
            # What a thread knows when it gives a stream something to do, the stream knows when it does it.
            if stream != host_thread():
                _merge(clock, self._clock(host_thread()))
            clock[stream] = clock.get(stream, 0) + 1
            mine = Access(start, stop, stream, clock[stream], writes, what, name)
            for other in self._accesses:
                if _conflict(mine, other) and clock.get(other.stream, 0) < other.count:
                    raise self._error(mine, other)
            if writes or stream != COMPUTE or self._place(start) is not None:
                self._keep(mine, clock)

    def _keep(self, mine: Access, clock: Clock) -> None:
        """Remember an access in place of older ones that it stands for."""

        def is_covered(old: Access) -> bool:
            inside = mine.start <= old.start and old.stop <= mine.stop
            known = clock.get(old.stream, 0) >= old.count
            return (
                inside and known and (mine.writes or (not old.writes and old.stream == mine.stream))
            )

        self._accesses = [old for old in self._accesses if not is_covered(old)]
        self._accesses.append(mine)

    def _clock(self, stream: str) -> dict[str, int]:
        return self._clocks.setdefault(stream, {})

    def _place(self, address: int) -> tuple[str, int] | None:
        for name, (start, stop) in self._places.items():
            if start <= address < stop:
                return name, address - start
        return None

    def _error(self, mine: Access, other: Access) -> RaceError:
        first = max(mine.start, other.start)
        name, offset = self._place(first) or ("memory", first)
        return RaceError(
            f"{mine.what} {_verb(mine)} '{mine.tensor}' at address {offset} of the {name}, which {other.what} "
            f"{_verb(other)} as '{other.tensor}', and no event orders the two; a wait of the plan is missing, "
            "or a copy starts before the bytes are released",
            tensor=mine.tensor,
            address=offset,
        )


def host_thread() -> str:
    """Return the name of the calling thread's own clock."""
    return f"thread {threading.get_ident()}"


def tensors_in(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments of an op: lists, tuples and dicts are looked into."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte that a tensor touches and of the one after its last."""
    if not tensor.numel():
        return 0, 0
    start: int = tensor.data_ptr()
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return start, start + (last + 1) * tensor.element_size()


def _conflict(one: Access, other: Access) -> bool:
    overlap = one.start < other.stop and other.start < one.stop
    return overlap and (one.writes or other.writes) and one.stream != other.stream


def _merge(clock: dict[str, int], other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"
