"""Walk: the copies of every tensor while the steps of a plan are walked, and the rules that no step may break.

The one walk: the verifier refuses by it, the account of bytes alive, pictures of memory and fused segments count by
it. The steps are walked in program order with the value that every copy of a tensor holds. Memory is counted in the
same order, so it does not depend on how fast transfers are. What has an address is the arena's; for all else the
rules are:

* an op needs the present value of what it reads at its site; its first write of a tensor takes memory;
* a write makes the copies on other tiers stale; a copy that no later step uses gives its room back;
* an offload leaves the bytes where they are until a release, a reload takes memory when it starts;
* one to the tensor's home, which keeps an older value, may carry less: at least what has changed since;
* what is neither weight nor state frees itself after the last step that touches it, an output at the end;
* an op may be computed again while its inputs hold what they held, and only if it made all that it
  writes, no output among it, and nothing has changed that since;
* an op elsewhere changes what lasts only at its home, while no other tier has a copy of it;
* an iteration of a repeating workload ends as it began; in one that runs once, what persists ends at home.

What crosses the end of an iteration is on its way when the first one begins. One iteration that ends as it began
stands for all that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gascompile.core.machine import Link
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import PERSISTENT, TensorKind
from gascompile.cost_models.simulate.arena import ArenaAccount
from gascompile.cost_models.simulate.byte_ranges import refuse
from gascompile.cost_models.simulate.replay import up_front_transfers
from gascompile.cost_models.simulate.touches import (
    copy_ends,
    first_touches,
    heap_tensors,
    last_touches,
)


@dataclass(slots=True)
class _Copy:
    """A tensor's bytes on one tier."""

    version: int
    link: str | None = None
    """The link it is arriving over; ``None`` once it is there."""
    is_met: bool = False
    """Its own tier has waited for it alone."""


class Walk:
    """One iteration of a plan. Whoever passes ``on_change`` hears of tiers, tensors and bytes as they change."""

    def __init__(
        self, plan: Plan, on_change: Callable[[str, str, int], None] | None = None
    ) -> None:
        """Take a plan whose tensors, ops and order of steps have been checked.

        Args:
            plan: the plan.
            on_change: called with a tier, a tensor, empty for workspace, and the bytes that it takes more.
        """
        on_heap = heap_tensors(plan)
        self.plan, self.site = plan, plan.machine.compute_tier
        self.held = dict.fromkeys(plan.machine.tiers, 0)
        """Bytes per tier outside of the arena."""
        self.peak = dict(self.held)
        self.before: list[int] = []
        """What the tier that computes holds outside of the arena before each step."""
        self._on_change = on_change
        self._arena = ArenaAccount(plan, on_heap, self._tell_of_arena)
        self._kinds = {t.name: t.kind for t in plan.workload.tensors if t.name in on_heap}
        self._sizes = {t.name: t.size_bytes for t in plan.workload.tensors if t.name in on_heap}
        self._anchors: dict[str, str] = {}
        """Slow tier that is a persistent tensor's home: it keeps room for it all the time."""
        self._version: dict[str, int] = {}
        """The value that each tensor has now, as a number of its writes."""
        self._copies: dict[str, dict[str, _Copy]] = {}
        """Per tensor its copy on each tier."""
        self._values_read: dict[int, dict[str, int]] = {}
        """Per op that has run the values that it read."""
        self._values_made: dict[int, dict[str, int]] = {}
        """Per op that has run the values of the tensors that it made, not changed."""
        self._behind: dict[str, int] = {}
        """Bytes by which the value at home is older than it should be, at most, where only parts have changed."""
        self._links = {link.name: link for link in plan.machine.links}
        self._last = last_touches(plan)
        self._ends = copy_ends(plan)
        """``(step, tensor, tier)``: after the step nothing needs the copy."""

    def run(self) -> Walk:
        """Walk an iteration and return this walk.

        Raises:
            PlanVerificationError: a step breaks one of the rules; names the first one.
        """
        self.begin()
        began = self._state()
        for i, step in enumerate(self.plan.steps):
            self.start(i, step)
            self.end(i, step)
        self.finish()
        ended = self._state()
        changed = [name for name in (*ended, *began) if began.get(name) != ended.get(name)]
        if self.plan.workload.repeats and changed:
            refuse(f"'{changed[0]}' ends the iteration elsewhere than it began it")
        return self

    def begin(self) -> None:
        """Put what persists where the iteration expects it, and what crosses its end on its way."""
        plan = self.plan
        self._arena.place_residents()
        for name, tensor in plan.tensors.items():
            is_away = tensor.kind == TensorKind.WEIGHT and tensor.home != self.site
            if is_away and name not in self._kinds:
                self._hold(tensor.home, name, tensor.size_bytes)
        crossing: dict[str, Offload | Reload] = {}
        for i in up_front_transfers(plan.steps) if plan.workload.repeats else ():
            step = plan.steps[i]
            if isinstance(step, (Offload, Reload)):
                crossing[step.tensor] = step
            elif not isinstance(step, (Compute, Recompute)):
                self._arena.move(i, step)
        first = first_touches(plan)
        for name, kind in self._kinds.items():
            if kind not in PERSISTENT:
                continue
            home = plan.tensors[name].home
            self._version[name] = 0
            if home != self.site:
                self._anchors[name] = home
                self._hold(home, name, self._sizes[name])
            self._put(name, home, 0)
            if plan.workload.repeats and self._expects_it_here(first.get(name)):
                self._put(name, self.site, 0)
            if name in crossing:
                self._put_on_its_way(crossing[name])

    def _put_on_its_way(self, step: Offload | Reload) -> None:
        if step.link not in self._links:
            refuse(f"'{step.tensor}' moves over the link '{step.link}', which does not exist")
        if isinstance(step, Offload):
            self._put(step.tensor, self.site, 0)
        self._put(step.tensor, self._links[step.link].target_tier, 0, step.link)

    def _expects_it_here(self, first: Step | None) -> bool:
        """Whether the first step that touches a tensor of a slow tier wants it where ops compute."""
        if isinstance(first, Compute):
            return self.plan.ops[first.op].site == self.site
        return isinstance(first, (Release, Offload, Recompute))

    def _state(self) -> dict[str, object]:
        """Return where each persistent tensor is and whether its copies are good."""
        persisting = {
            name: tuple(
                sorted(
                    (tier, copy.version == self._version[name], copy.link is None)
                    for tier, copy in self._copies[name].items()
                )
            )
            for name, kind in self._kinds.items()
            if kind in PERSISTENT
        }
        return {**persisting, **self._arena.state()}

    def start(self, i: int, step: Step) -> None:
        """Begin a step; an op has its results and its workspace from here on."""
        self.before.append(self.held[self.site])
        match step:
            case Compute():
                self._compute(i, step.op)
            case Recompute():
                self._recompute(i, step.source)
            case Wait(site=None) if step.tensor in self._kinds:
                self._wait(i, step.tensor)
            case Wait() if step.tensor in self._kinds:
                self._meet(i, step)
            case Release() if step.tensor in self._kinds:
                self._release(i, step.tensor)
            case Offload() if step.tensor in self._kinds:
                self._offload(i, step)
            case Reload() if step.tensor in self._kinds:
                self._reload(i, step)
            case Offload() | Reload():
                refuse(f"step {i} moves '{step.tensor}', which is not on the heap", i)
            case _:
                self._arena.move(i, step)

    def end(self, i: int, step: Step) -> None:
        """End a step: what nothing needs after it goes."""
        if not isinstance(step, (Compute, Recompute)):
            self._forget([step.tensor], i)
            return
        op = step.op if isinstance(step, Compute) else step.source
        spec, site = self.plan.workload.ops[op], self.plan.ops[op].site
        self._hold(site, "", -spec.workspace_bytes)
        for name in dict.fromkeys(spec.writes) if isinstance(step, Compute) else ():
            if name in self._kinds:
                self._fall_behind(name, spec.patches.get(name, self._sizes[name]))
                for tier in [tier for tier in self._copies[name] if tier != site]:
                    self._drop(name, tier)
        self._forget([*spec.reads, *spec.writes], i)

    def _compute(self, i: int, op: int) -> None:
        self._arena.need(i, op)
        spec, site = self.plan.workload.ops[op], self.plan.ops[op].site
        self._values_read[op] = {n: self._version[n] for n in spec.reads if n in self._version}
        for name in dict.fromkeys(spec.reads):
            self._need(i, spec.name, name, site, self._version.get(name, 0))
        written = [name for name in dict.fromkeys(spec.writes) if name in self._kinds]
        for name in written:
            if name in self._version:
                self._need(i, spec.name, name, site, self._version[name])
                self._require_no_copy(i, spec.name, name)
                self._require_at_home(i, spec.name, name, site)
        self._values_made[op] = dict.fromkeys((n for n in written if n not in self._version), 0)
        for name in written:
            self._version[name] = self._version.get(name, -1) + 1
            self._put(name, site, self._version[name])
        self._hold(site, "", spec.workspace_bytes)

    def _require_at_home(self, i: int, op: str, name: str, site: str) -> None:
        """Refuse an op elsewhere that changes what lasts anywhere but at home, or beside a copy of it."""
        if site == self.site or self._kinds[name] not in PERSISTENT:
            return
        if self._anchors.get(name) != site or set(self._copies[name]) != {site}:
            refuse(f"op '{op}' changes '{name}' on '{site}', which lies elsewhere too", i)

    def _fall_behind(self, name: str, changed_bytes: int) -> None:
        """Take note of what a write changes of a tensor, whose home keeps the value of before."""
        home = self._anchors.get(name)
        if not self.plan.workload.repeats or home is None:
            return
        known = 0 if home in self._copies[name] else self._behind.get(name, self._sizes[name])
        self._behind[name] = min(known + changed_bytes, self._sizes[name])

    def _recompute(self, i: int, source: int) -> None:
        if source not in self._values_read:
            refuse(f"step {i} computes op {source} again, which has not run yet", i)
        self._arena.need(i, source)
        spec, site = self.plan.workload.ops[source], self.plan.ops[source].site
        for name, version in self._values_read[source].items():
            self._need(i, spec.name, name, site, version)
        for name in dict.fromkeys(spec.writes):
            if self._kinds.get(name) == TensorKind.OUTPUT:
                refuse(f"step {i} computes the output '{name}' again", i)
            if self._values_made[source].get(name) != self._version.get(name, -1):
                refuse(
                    f"step {i} computes op '{spec.name}' again, which does not make '{name}' as it is now",
                    i,
                )
            self._require_no_copy(i, spec.name, name)
            if site not in self._copies.get(name, {}):
                self._put(name, site, self._version[name])
        self._hold(site, "", spec.workspace_bytes)

    def _need(self, i: int, op: str, name: str, site: str, version: int) -> None:
        if name not in self._kinds:
            return
        copy = self._copies.get(name, {}).get(site)
        if copy is None or (copy.link is not None and not copy.is_met):
            state = "has not arrived" if copy else "is not there"
            refuse(f"op '{op}' needs '{name}' on '{site}', where it {state}", i)
        if copy.version != version:
            refuse(f"op '{op}' would find another value of '{name}' than it should", i)

    def _require_no_copy(self, i: int, op: str, name: str) -> None:
        if any(copy.link is not None for copy in self._copies.get(name, {}).values()):
            refuse(f"op '{op}' writes '{name}' while it is being copied", i)

    def _link(self, i: int, step: Offload | Reload) -> Link:
        link = self._links.get(step.link)
        if link is None:
            refuse(f"step {i} names the link '{step.link}', which does not exist", i)
        needed = self._sizes[step.tensor]
        if isinstance(step, Offload) and self._anchors.get(step.tensor) == link.target_tier:
            needed = min(needed, self._behind.get(step.tensor, needed))
        if not needed <= step.size_bytes <= self._sizes[step.tensor]:
            refuse(
                f"step {i} moves {step.size_bytes} bytes of '{step.tensor}', "
                f"of which {needed} have to move",
                i,
            )
        ends = (link.source_tier, link.target_tier)
        wanted = ends[0] if isinstance(step, Offload) else ends[1]
        if wanted != self.site or ends[0] == ends[1]:
            refuse(f"step {i} moves '{step.tensor}' over '{step.link}', the wrong way", i)
        return link

    def _offload(self, i: int, step: Offload) -> None:
        link, name = self._link(i, step), step.tensor
        here = self._copies.get(name, {}).get(self.site)
        if here is None or here.link is not None or here.version != self._version[name]:
            refuse(f"step {i} copies '{name}' out, which is not there", i)
        self._require_no_copy(i, f"step {i}", name)
        self._put(name, link.target_tier, here.version, link.name)

    def _reload(self, i: int, step: Reload) -> None:
        link, name = self._link(i, step), step.tensor
        copies = self._copies.get(name, {})
        there = copies.get(link.source_tier)
        if there is None or there.link is not None or there.version != self._version[name]:
            refuse(f"step {i} reads '{name}' from '{link.source_tier}', which has no good copy", i)
        if self.site in copies:
            refuse(f"step {i} reads '{name}' again, which is still there", i)
        self._put(name, self.site, there.version, link.name)

    def _wait(self, i: int, name: str) -> None:
        flying = [c for c in self._copies.get(name, {}).values() if c.link is not None]
        if not flying:
            refuse(f"step {i} waits for '{name}', which no step is moving", i)
        for copy in flying:
            copy.link = None

    def _meet(self, i: int, step: Wait) -> None:
        """Let one tier have the copy that comes there, whose source must stay until all have waited."""
        copy = self._copies.get(step.tensor, {}).get(step.site or "")
        is_elsewhere = step.site in {op.site for op in self.plan.ops} - {self.site}
        if copy is None or copy.link is None or not is_elsewhere:
            refuse(
                f"step {i} waits on '{step.site}' for '{step.tensor}', which does not come there", i
            )
        copy.is_met = True

    def _release(self, i: int, name: str) -> None:
        copies = self._copies.get(name, {})
        if self.site not in copies:
            refuse(f"step {i} releases '{name}', which is not there", i)
        if any(copy.link is not None for copy in copies.values()):
            refuse(f"step {i} releases '{name}' while it is being copied", i)
        if self._kinds[name] in PERSISTENT and not any(
            tier != self.site and copy.version == self._version[name]
            for tier, copy in copies.items()
        ):
            refuse(f"step {i} releases '{name}', whose value is nowhere else", i)
        self._drop(name, self.site)

    def _put(self, name: str, tier: str, version: int, link: str | None = None) -> None:
        copies = self._copies.setdefault(name, {})
        is_new = tier not in copies and self._anchors.get(name) != tier
        copies[tier] = _Copy(version, link)
        if is_new:
            self._hold(tier, name, self._sizes[name])

    def _drop(self, name: str, tier: str) -> None:
        del self._copies[name][tier]
        if self._anchors.get(name) != tier:
            self._hold(tier, name, -self._sizes[name])

    def _hold(self, tier: str, name: str, size_bytes: int) -> None:
        """Count bytes that a tensor, or workspace, takes of a tier."""
        self.held[tier] += size_bytes
        self.peak[tier] = max(self.peak[tier], self.held[tier])
        if self._on_change is not None and size_bytes:
            self._on_change(tier, name, size_bytes)

    def _tell_of_arena(self, tier: str, name: str, size_bytes: int) -> None:
        """Pass on what changes in an arena, which is counted as a whole."""
        if self._on_change is not None and size_bytes:
            self._on_change(tier, name, size_bytes)

    def _forget(self, names: Sequence[str], i: int) -> None:
        """Drop after step ``i`` what no later step needs."""
        for name in dict.fromkeys(names):
            if name not in self._kinds:
                continue
            kind, copies = self._kinds[name], self._copies.get(name, {})
            if kind not in (*PERSISTENT, TensorKind.OUTPUT) and self._last.get(name) == i:
                if any(copy.link is not None for copy in copies.values()):
                    refuse(f"'{name}' is given up while it is being copied", i)
                for tier in list(copies):
                    self._drop(name, tier)
                continue
            for tier in [t for t in copies if (i, name, t) in self._ends]:
                if self._anchors.get(name) != tier and copies[tier].link is None:
                    self._drop(name, tier)

    def finish(self) -> None:
        """Check what the iteration leaves behind; what does not persist is handed over or gone."""
        self._arena.end()
        for name, kind in self._kinds.items():
            copies = self._copies.get(name, {})
            moving = any(copy.link is not None for copy in copies.values())
            if moving and (kind not in PERSISTENT or not self.plan.workload.repeats):
                refuse(f"'{name}' is still being copied at the end of the iteration")
            if kind == TensorKind.OUTPUT and name in self._version:
                here = copies.get(self.site)
                if here is None or here.version != self._version[name]:
                    refuse(f"the output '{name}' is not on '{self.site}' at the end")
            if kind not in PERSISTENT:
                for tier in list(copies):
                    self._drop(name, tier)
                continue
            at_home = copies.get(self.plan.tensors[name].home)
            if not self.plan.workload.repeats and (
                at_home is None or at_home.version != self._version[name]
            ):
                refuse(f"'{name}' is not at home at the end as it is now")
