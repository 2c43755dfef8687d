"""Heap: what a plan's tensors outside the arena take per tier, and whether each op reads what it should.

The steps are walked in program order with the value that every copy of a tensor holds. Memory is
counted in the same order, so it does not depend on how fast transfers are. The rules:

* an op needs the present value of what it reads at its site; its first write of a tensor takes memory;
* a write makes the copies on other tiers stale; a copy that no later step uses gives its room back;
* an offload leaves the bytes where they are until a release, a reload takes memory when it starts;
* one to the tensor's home, which keeps an older value, may carry less: at least what has changed since;
* what is neither weight nor state frees itself after the last step that touches it, an output at the end;
* an op may be computed again while its inputs hold what they held, and only if it made all that it
  writes, no output among it, and nothing has changed that since;
* an op elsewhere changes what lasts only at its home, while no other tier has a copy of it;
* an iteration of a repeating workload ends as it began; in one that runs once, what persists ends at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from gascompile.core.errors import PlanVerificationError
from gascompile.core.machine import Link
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import PERSISTENT, TensorKind
from gascompile.cost_models.simulate.replay import up_front_transfers
from gascompile.cost_models.simulate.touches import copy_ends, first_touches, last_touches


def heap(plan: Plan) -> dict[str, int]:
    """Return the peak bytes per tier of all that is not in the arena.

    Raises:
        PlanVerificationError: a step breaks one of the rules; names the first one.
    """
    return _Heap(plan).run()


def heap_before(plan: Plan) -> tuple[list[int], int]:
    """Return the bytes outside the arena in the tier that computes before each step of a plan, and their peak.

    Raises:
        PlanVerificationError: a step breaks one of the rules; names the first one.
    """
    walk = _Heap(plan)
    peak = walk.run()
    return walk.before, peak[walk.site]


def heap_tensors(plan: Plan) -> frozenset[str]:
    """Return the tensors outside the arena; a caller's inputs are nobody's."""
    streamed = {step.tensor for step in plan.steps if isinstance(step, Prefetch)}
    return frozenset(
        spec.name
        for spec in plan.workload.tensors
        if spec.kind != TensorKind.INPUT
        and spec.name not in streamed
        and plan.tensors[spec.name].address is None
    )


@dataclass(slots=True)
class _Copy:
    """A tensor's bytes on one tier."""

    version: int
    link: str | None = None
    """The link it is arriving over; ``None`` once it is there."""
    is_met: bool = False
    """Its own tier has waited for it alone."""


@dataclass(slots=True)
class _Heap:
    plan: Plan
    site: str = ""
    """The tier that computes."""
    kinds: dict[str, TensorKind] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    anchors: dict[str, str] = field(default_factory=dict)
    """Slow tier that is a persistent tensor's home: it keeps room for it all the time."""
    version: dict[str, int] = field(default_factory=dict)
    """The value that each tensor has now, as a number of its writes."""
    copies: dict[str, dict[str, _Copy]] = field(default_factory=dict)
    """Per tensor its copy on each tier."""
    held: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    values_read: dict[int, dict[str, int]] = field(default_factory=dict)
    """Per op that has run the values that it read."""
    values_made: dict[int, dict[str, int]] = field(default_factory=dict)
    """Per op that has run the values of the tensors that it made, not changed."""
    last: dict[str, int] = field(default_factory=dict)
    ends: frozenset[tuple[int, str, str]] = frozenset()
    """``(step, tensor, tier)``: after the step nothing needs the copy."""
    links: dict[str, Link] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)
    """What the tier that computes holds before each step."""
    behind: dict[str, int] = field(default_factory=dict)
    """Bytes by which the value at home is older than it should be, at most, where only parts have changed since."""

    def run(self) -> dict[str, int]:
        """Walk one iteration; return the peaks."""
        plan = self.plan
        self.site = plan.machine.compute_tier
        on_heap = heap_tensors(plan)
        self.kinds = {t.name: t.kind for t in plan.workload.tensors if t.name in on_heap}
        self.sizes = {t.name: t.size_bytes for t in plan.workload.tensors if t.name in on_heap}
        self.held = dict.fromkeys(plan.machine.tiers, 0)
        self.peak = dict.fromkeys(plan.machine.tiers, 0)
        self.links = {link.name: link for link in plan.machine.links}
        self.last = last_touches(plan)
        self.ends = copy_ends(plan)
        self._begin()
        began = self._state()
        for i, step in enumerate(plan.steps):
            self.before.append(self.held[self.site])
            self._step(i, step)
        self._finish()
        changed = [name for name, state in self._state().items() if began[name] != state]
        if plan.workload.repeats and changed:
            self._refuse(f"'{changed[0]}' ends the iteration elsewhere than it began it")
        return self.peak

    def _begin(self) -> None:
        """Put what persists where the iteration expects it."""
        crossing = _crossing(self.plan)
        first = first_touches(self.plan)
        for name, kind in self.kinds.items():
            if kind not in PERSISTENT:
                continue
            home = self.plan.tensors[name].home
            self.version[name] = 0
            if home == self.site:
                self._put(name, home, 0)
            else:
                self.anchors[name] = home
                self.held[home] += self.sizes[name]
                self._put(name, home, 0)
                if self.plan.workload.repeats and self._expects_it_here(first.get(name)):
                    self._put(name, self.site, 0)
            if name in crossing:
                link = self.links[crossing[name].link]
                if isinstance(crossing[name], Offload):
                    self._put(name, self.site, 0)
                self._put(name, link.target_tier, 0, link.name)

    def _expects_it_here(self, first: Step | None) -> bool:
        """Whether the first step that touches a tensor of a slow tier wants it where ops compute."""
        if isinstance(first, Compute):
            return self.plan.ops[first.op].site == self.site
        return isinstance(first, (Release, Offload, Recompute))

    def _state(self) -> dict[str, tuple[tuple[str, bool, bool], ...]]:
        """Return where each persistent tensor is and whether its copies are good."""
        return {
            name: tuple(
                sorted(
                    (tier, copy.version == self.version[name], copy.link is None)
                    for tier, copy in self.copies[name].items()
                )
            )
            for name, kind in self.kinds.items()
            if kind in PERSISTENT
        }

    def _step(self, i: int, step: Step) -> None:
        if isinstance(step, Compute):
            self._compute(i, step.op)
        elif isinstance(step, Recompute):
            self._recompute(i, step.source)
        elif step.tensor in self.kinds:
            match step:
                case Wait(site=None):
                    self._wait(i, step.tensor)
                case Wait():
                    self._meet(i, step)
                case Release():
                    self._release(i, step.tensor)
                case Offload():
                    self._offload(i, step)
                case Reload():
                    self._reload(i, step)
            self._forget([step.tensor], i)

    # ------------------------------------------------------------ ops

    def _compute(self, i: int, op: int) -> None:
        spec, site = self.plan.workload.ops[op], self.plan.ops[op].site
        self.values_read[op] = {n: self.version[n] for n in spec.reads if n in self.version}
        for name in dict.fromkeys(spec.reads):
            self._need(i, spec.name, name, site, self.version.get(name, 0))
        written = [name for name in dict.fromkeys(spec.writes) if name in self.kinds]
        for name in written:
            if name in self.version:
                self._need(i, spec.name, name, site, self.version[name])
                self._settled(i, spec.name, name)
                self._require_at_home(i, spec.name, name, site)
        self.values_made[op] = dict.fromkeys((n for n in written if n not in self.version), 0)
        for name in written:
            self.version[name] = self.version.get(name, -1) + 1
            self._put(name, site, self.version[name])
        self._work(site, spec.workspace_bytes)
        for name in written:
            self._fall_behind(name, spec.patches.get(name, self.sizes[name]))
            for tier in [tier for tier in self.copies[name] if tier != site]:
                self._drop(name, tier)
        self._forget([*spec.reads, *spec.writes], i)

    def _require_at_home(self, i: int, op: str, name: str, site: str) -> None:
        """Refuse an op elsewhere that changes what lasts anywhere but at home, or beside a copy of it."""
        if site == self.site or self.kinds[name] not in PERSISTENT:
            return
        if self.anchors.get(name) != site or set(self.copies[name]) != {site}:
            self._refuse(f"op '{op}' changes '{name}' on '{site}', which lies elsewhere too", i)

    def _fall_behind(self, name: str, changed_bytes: int) -> None:
        """Take note of what a write changes of a tensor, whose home keeps the value of before."""
        home = self.anchors.get(name)
        if not self.plan.workload.repeats or home is None:
            return
        known = 0 if home in self.copies[name] else self.behind.get(name, self.sizes[name])
        self.behind[name] = min(known + changed_bytes, self.sizes[name])

    def _recompute(self, i: int, source: int) -> None:
        if source not in self.values_read:
            self._refuse(f"step {i} computes op {source} again, which has not run yet", i)
        spec, site = self.plan.workload.ops[source], self.plan.ops[source].site
        for name, version in self.values_read[source].items():
            self._need(i, spec.name, name, site, version)
        for name in dict.fromkeys(spec.writes):
            if self.kinds.get(name) == TensorKind.OUTPUT:
                self._refuse(f"step {i} computes the output '{name}' again", i)
            if self.values_made[source].get(name) != self.version.get(name, -1):
                self._refuse(
                    f"step {i} computes op '{spec.name}' again, which does not make '{name}' as it is now",
                    i,
                )
            self._settled(i, spec.name, name)
            if site not in self.copies.get(name, {}):
                self._put(name, site, self.version[name])
        self._work(site, spec.workspace_bytes)
        self._forget([*spec.reads, *spec.writes], i)

    def _need(self, i: int, op: str, name: str, site: str, version: int) -> None:
        if name not in self.kinds:
            return
        copy = self.copies.get(name, {}).get(site)
        if copy is None or (copy.link is not None and not copy.is_met):
            state = "has not arrived" if copy else "is not there"
            self._refuse(f"op '{op}' needs '{name}' on '{site}', where it {state}", i)
        if copy.version != version:
            self._refuse(f"op '{op}' would find another value of '{name}' than it should", i)

    def _settled(self, i: int, op: str, name: str) -> None:
        if any(copy.link is not None for copy in self.copies.get(name, {}).values()):
            self._refuse(f"op '{op}' writes '{name}' while it is being copied", i)

    # ------------------------------------------------------------ moves

    def _link(self, i: int, step: Offload | Reload) -> Link:
        link = self.links.get(step.link)
        if link is None:
            self._refuse(f"step {i} names the link '{step.link}', which does not exist", i)
        needed = self.sizes[step.tensor]
        if isinstance(step, Offload) and self.anchors.get(step.tensor) == link.target_tier:
            needed = min(needed, self.behind.get(step.tensor, needed))
        if not needed <= step.size_bytes <= self.sizes[step.tensor]:
            self._refuse(
                f"step {i} moves {step.size_bytes} bytes of '{step.tensor}', "
                f"of which {needed} have to move",
                i,
            )
        ends = (link.source_tier, link.target_tier)
        wanted = ends[0] if isinstance(step, Offload) else ends[1]
        if wanted != self.site or ends[0] == ends[1]:
            self._refuse(f"step {i} moves '{step.tensor}' over '{step.link}', the wrong way", i)
        return link

    def _offload(self, i: int, step: Offload) -> None:
        link, name = self._link(i, step), step.tensor
        here = self.copies.get(name, {}).get(self.site)
        if here is None or here.link is not None or here.version != self.version[name]:
            self._refuse(f"step {i} copies '{name}' out, which is not there", i)
        self._settled(i, f"step {i}", name)
        self._put(name, link.target_tier, here.version, link.name)

    def _reload(self, i: int, step: Reload) -> None:
        link, name = self._link(i, step), step.tensor
        copies = self.copies.get(name, {})
        there = copies.get(link.source_tier)
        if there is None or there.link is not None or there.version != self.version[name]:
            self._refuse(
                f"step {i} reads '{name}' from '{link.source_tier}', which has no good copy", i
            )
        if self.site in copies:
            self._refuse(f"step {i} reads '{name}' again, which is still there", i)
        self._put(name, self.site, there.version, link.name)

    def _wait(self, i: int, name: str) -> None:
        flying = [c for c in self.copies.get(name, {}).values() if c.link is not None]
        if not flying:
            self._refuse(f"step {i} waits for '{name}', which no step is moving", i)
        for copy in flying:
            copy.link = None

    def _meet(self, i: int, step: Wait) -> None:
        """Let one tier have the copy that comes there, whose source must stay until all have waited."""
        copy = self.copies.get(step.tensor, {}).get(step.site or "")
        is_elsewhere = step.site in {op.site for op in self.plan.ops} - {self.site}
        if copy is None or copy.link is None or not is_elsewhere:
            self._refuse(
                f"step {i} waits on '{step.site}' for '{step.tensor}', which does not come there", i
            )
        copy.is_met = True

    def _release(self, i: int, name: str) -> None:
        copies = self.copies.get(name, {})
        if self.site not in copies:
            self._refuse(f"step {i} releases '{name}', which is not there", i)
        if any(copy.link is not None for copy in copies.values()):
            self._refuse(f"step {i} releases '{name}' while it is being copied", i)
        if self.kinds[name] in PERSISTENT and not any(
            tier != self.site and copy.version == self.version[name]
            for tier, copy in copies.items()
        ):
            self._refuse(f"step {i} releases '{name}', whose value is nowhere else", i)
        self._drop(name, self.site)

    # ------------------------------------------------------------ memory

    def _put(self, name: str, tier: str, version: int, link: str | None = None) -> None:
        copies = self.copies.setdefault(name, {})
        if tier not in copies and self.anchors.get(name) != tier:
            self.held[tier] += self.sizes[name]
        copies[tier] = _Copy(version, link)
        self.peak[tier] = max(self.peak[tier], self.held[tier])

    def _drop(self, name: str, tier: str) -> None:
        del self.copies[name][tier]
        if self.anchors.get(name) != tier:
            self.held[tier] -= self.sizes[name]

    def _work(self, site: str, workspace_bytes: int) -> None:
        self.peak[site] = max(self.peak[site], self.held[site] + workspace_bytes)

    def _forget(self, names: Sequence[str], i: int) -> None:
        """Drop after step ``i`` what no later step needs."""
        for name in dict.fromkeys(names):
            if name not in self.kinds:
                continue
            kind, copies = self.kinds[name], self.copies.get(name, {})
            if kind not in (*PERSISTENT, TensorKind.OUTPUT) and self.last.get(name) == i:
                if any(copy.link is not None for copy in copies.values()):
                    self._refuse(f"'{name}' is given up while it is being copied", i)
                for tier in list(copies):
                    self._drop(name, tier)
                continue
            for tier in [t for t in copies if (i, name, t) in self.ends]:
                if self.anchors.get(name) != tier and copies[tier].link is None:
                    self._drop(name, tier)

    def _finish(self) -> None:
        """Check what the iteration leaves behind."""
        for name, kind in self.kinds.items():
            copies = self.copies.get(name, {})
            moving = any(copy.link is not None for copy in copies.values())
            if moving and (kind not in PERSISTENT or not self.plan.workload.repeats):
                self._refuse(f"'{name}' is still being copied at the end of the iteration")
            if kind == TensorKind.OUTPUT and name in self.version:
                here = copies.get(self.site)
                if here is None or here.version != self.version[name]:
                    self._refuse(f"the output '{name}' is not on '{self.site}' at the end")
            if kind not in PERSISTENT:
                for tier in list(copies):
                    self._drop(name, tier)
                continue
            at_home = copies.get(self.plan.tensors[name].home)
            if not self.plan.workload.repeats and (
                at_home is None or at_home.version != self.version[name]
            ):
                self._refuse(f"'{name}' is not at home at the end as it is now")

    def _refuse(self, message: str, step: int = -1) -> NoReturn:
        raise PlanVerificationError(
            f"{message}; the plan is refused, make it again from its workload", step=step
        )


def _crossing(plan: Plan) -> dict[str, Offload | Reload]:
    """Return the heap's transfers that cross the end of the iteration."""
    if not plan.workload.repeats:
        return {}
    steps = [plan.steps[i] for i in up_front_transfers(plan.steps)]
    return {s.tensor: s for s in steps if isinstance(s, (Offload, Reload)) and s.address is None}
