"""Middle: the copies of weights that wait in a place between their home and where ops compute, while steps are walked.

Such a place has an arena of its own. A copy has its bytes from the step that starts to read it to the one that
evicts it; no byte has two owners. It is clean, and from it a weight is pushed on, as often as it is needed: a
push begins once the copy is there, so that nobody waits for it in between. A copy goes once every push of it has
been waited for, and at least one was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gascompile.core.plan import Plan
from gascompile.core.sizes import PAGE_BYTES, reserve_bytes
from gascompile.core.steps import Evict, Fetch, Prefetch, Wait, fetched_to, is_push
from gascompile.core.workload import TensorKind
from gascompile.cost_models.simulate.byte_ranges import ByteRanges, Held, refuse


@dataclass(slots=True)
class _Fetched(Held):
    """Bytes of a weight in the place in between, or on their way there."""

    address: int = 0
    """Of its push that is under way."""
    is_leaving: bool = False
    """A push of it has not been waited for."""
    is_used: bool = False
    """It has been pushed."""


@dataclass(slots=True)
class MiddleAccount:
    """The copies in the arenas in between. Who passes ``on_change`` hears of bytes that are taken and given back."""

    plan: Plan
    on_change: Callable[[str, str, int], None]
    """Called with a place, a tensor and the bytes that it takes more."""
    copies: dict[str, _Fetched] = field(default_factory=dict)
    """One live copy per weight."""
    ranges: dict[str, ByteRanges] = field(default_factory=dict)
    """Per place the bytes of ``copies``."""
    places: dict[str, str] = field(init=False)
    """The place in between of each weight that has one."""

    def __post_init__(self) -> None:
        self.places = fetched_to(self.plan.steps)

    def fetch(self, i: int, step: Fetch) -> None:
        """Take the room of a copy."""
        self._check(i, step)
        if step.tensor in self.copies:
            refuse(f"step {i} fetches '{step.tensor}' again before its last copy is evicted", i)
        begin, end = step.address, step.address + reserve_bytes(step.size_bytes)
        ranges = self.ranges.setdefault(step.place, ByteRanges())
        other = ranges.overlapping(begin, end)
        if other is not None:
            refuse(
                f"step {i} fetches '{step.tensor}' to {begin}..{end} of '{step.place}', where "
                f"'{other.tensor}' still has {other.begin}..{other.end}",
                i,
            )
        self.copies[step.tensor] = copy = _Fetched(step.tensor, begin, end)
        ranges.add(copy)
        self.on_change(step.place, step.tensor, end - begin)

    def _check(self, i: int, step: Fetch) -> None:
        """Refuse what could not be a first hop, whatever is where."""
        moved, machine = self.plan.tensors[step.tensor], self.plan.machine
        if moved.kind != TensorKind.WEIGHT or moved.home in (machine.compute_tier, step.place):
            refuse(f"step {i} fetches '{step.tensor}', which is no weight of another place", i)
        link = next((link for link in machine.links if link.name == step.link), None)
        if link is None or (link.source_tier, link.target_tier) != (moved.home, step.place):
            refuse(
                f"step {i} fetches '{step.tensor}' over '{step.link}', but it goes from "
                f"'{moved.home}' to '{step.place}'",
                i,
            )
        nearer = any(feed.name == step.link for feed, _ in machine.two_hops())
        if not nearer or self.places[step.tensor] != step.place:
            refuse(
                f"step {i} fetches '{step.tensor}' to '{step.place}', which is not in between", i
            )
        if step.size_bytes != moved.size_bytes:
            refuse(
                f"step {i} fetches {step.size_bytes} bytes of '{step.tensor}', "
                f"which has {moved.size_bytes}",
                i,
            )
        arena_bytes = self.plan.arena_bytes.get(step.place, 0)
        end = step.address + reserve_bytes(step.size_bytes)
        if step.address < 0 or step.address % PAGE_BYTES or end > arena_bytes:
            refuse(
                f"step {i} fetches '{step.tensor}' to {step.address}..{end}, which is not in whole pages of the "
                f"{arena_bytes} bytes of the arena of '{step.place}'",
                i,
            )

    def push(self, i: int, step: Prefetch) -> None:
        """Note that a copy is pushed on, where the step is a second hop."""
        if not is_push(step, self.places):
            return
        copy = self.copies.get(step.tensor)
        if copy is None:
            place = self.places[step.tensor]
            refuse(f"step {i} pushes '{step.tensor}' from '{place}', where it is not", i)
        copy.is_leaving = copy.is_used = True
        copy.address = step.address

    def wait(self, step: Wait) -> None:
        """Note that a push has come through."""
        copy = self.copies.get(step.tensor)
        if copy is not None and copy.address == step.address:
            copy.is_leaving = False

    def evict(self, i: int, step: Evict) -> None:
        """Give the room of a copy back."""
        copy = self.copies.get(step.tensor)
        if copy is None or copy.begin != step.address or self.places.get(step.tensor) != step.place:
            where = f"{step.address} of '{step.place}'"
            refuse(f"step {i} evicts '{step.tensor}' at {where}, where it is not", i)
        if copy.is_leaving:
            refuse(f"step {i} evicts '{step.tensor}' while it is being pushed on", i)
        if not copy.is_used:
            refuse(f"step {i} evicts '{step.tensor}', which nobody has had of it", i)
        del self.copies[step.tensor]
        self.ranges[step.place].remove(copy)
        self.on_change(step.place, step.tensor, copy.begin - copy.end)

    def state(self) -> dict[str, tuple[int | bool, ...]]:
        """Return where each copy begins, whether it is leaving and whether it has been of use."""
        return {
            f"{name} of {self.places[name]}": (copy.begin, copy.is_leaving, copy.is_used)
            for name, copy in self.copies.items()
        }

    def end(self) -> None:
        """Refuse copies at the end of an iteration that none follows."""
        for name in self.copies if not self.plan.workload.repeats else ():
            refuse(f"'{name}' is not evicted from '{self.places[name]}' by the end")
