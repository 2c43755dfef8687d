"""Several events as one, for what waits for more than one of them."""

from __future__ import annotations

from collections.abc import Iterable

from gascompile.runtime.protocols import Event


class AllOf:
    """Several events as one; what a copy is given to wait for."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = tuple(events)

    @property
    def reached(self) -> bool:
        return all(event.reached for event in self.events)

    def wait(self) -> None:
        """Block until each is reached."""
        for event in self.events:
            event.wait()


def events_of(after: Event | None) -> tuple[Event, ...]:
    """Return the events that ``after`` is made of."""
    if after is None:
        return ()
    return after.events if isinstance(after, AllOf) else (after,)


def joined(events: Iterable[Event | None]) -> Event | None:
    """Return what is reached once all of ``events`` are; ``None`` where there is none."""
    each = [event for event in events if event is not None]
    return AllOf(each) if len(each) > 1 else next(iter(each), None)
