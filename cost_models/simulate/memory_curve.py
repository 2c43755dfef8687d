"""What each tier holds while the steps of a plan are walked, by use.

Memory is counted in program order, like in the verifier: a transfer takes its room when it starts, an
activation when it is first written, and gives it back after the last step that touches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import PERSISTENT, TensorKind, TensorSpec
from gascompile.cost_models.simulate.touches import copy_ends, last_touches

WEIGHTS, STREAMED, ACTIVATIONS = "weights", "streamed weights", "activations"
STATES, WORKSPACE = "states", "workspace"
USES = (STATES, WEIGHTS, STREAMED, ACTIVATIONS, WORKSPACE)
"""In the order in which a picture stacks them: what never changes at the bottom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes held by one tier: from ``times_s[i]`` on it holds the ``i``-th number of each use."""

    times_s: tuple[float, ...]
    bytes_by_use: Mapping[str, tuple[int, ...]]

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """All uses together, at each of the times."""
        columns = self.bytes_by_use.values()
        return tuple(sum(column[i] for column in columns) for i in range(len(self.times_s)))

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return max(self.total_bytes, default=0)


class MemoryRecorder:
    """Walks along and writes down every change."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._specs = {tensor.name: tensor for tensor in plan.workload.tensors}
        self._targets = {link.name: link.target_tier for link in plan.machine.links}
        self._site = plan.machine.compute_tier
        lasting = (*PERSISTENT, TensorKind.OUTPUT)
        self._last = {
            name: i
            for name, i in last_touches(plan).items()
            if name in self._specs and self._specs[name].kind not in lasting
        }
        self._copy_ends: dict[int, list[tuple[str, str]]] = {}
        for i, name, tier in copy_ends(plan):
            self._copy_ends.setdefault(i, []).append((name, tier))
        self._held = {tier: dict.fromkeys(USES, 0) for tier in plan.machine.tiers}
        self._copies: dict[tuple[str, str], tuple[str, int]] = {}
        """Use and bytes of each tensor's copy on each tier."""
        self._times: dict[str, list[float]] = {}
        self._columns: dict[str, dict[str, list[int]]] = {}
        self._homes: set[tuple[str, str]] = set()
        """Tensors with the tiers that keep room for them all the time."""
        for name, planned in plan.tensors.items():
            if planned.kind in PERSISTENT and planned.home in self._held:
                in_arena = planned.address is not None
                size = reserve_bytes(planned.size_bytes) if in_arena else planned.size_bytes
                use = WEIGHTS if planned.kind == TensorKind.WEIGHT else STATES
                self._held[planned.home][use] += size
                if in_arena or planned.home != self._site:
                    self._homes.add((name, planned.home))
                else:
                    self._copies[name, self._site] = (use, size)

    def begin(self) -> None:
        """Start an iteration at time 0."""
        self._times = {tier: [0.0] for tier in self._held}
        self._columns = {t: {u: [n] for u, n in held.items()} for t, held in self._held.items()}

    def end(self, now_s: float) -> None:
        """End the iteration: what is not persistent is handed over or gone."""
        for name, tier in list(self._copies):
            if self._specs[name].kind not in PERSISTENT:
                self._drop(name, tier, now_s)
        for tier in self._held:
            self._mark(tier, now_s)

    def curves(self) -> dict[str, MemoryCurve]:
        """Return the curves of the last iteration; uses that never occur are left out."""
        return {
            tier: MemoryCurve(
                times_s=tuple(times),
                bytes_by_use={u: tuple(c) for u, c in self._columns[tier].items() if any(c)},
            )
            for tier, times in self._times.items()
        }

    def before_op(self, op: int, now_s: float) -> None:
        """Take room for what an op writes and for its workspace."""
        spec, site = self._plan.workload.ops[op], self._plan.ops[op].site
        for name in (*spec.reads, *spec.writes):
            if self._specs[name].kind not in (TensorKind.INPUT, TensorKind.WEIGHT):
                self._take(name, site, now_s)
        self._change(site, WORKSPACE, spec.workspace_bytes, now_s)

    def step(self, i: int, step: Step, now_s: float) -> None:
        """Take and free what step ``i`` does; an op has ended at ``now_s``."""
        match step:
            case Compute(op=op) | Recompute(source=op):
                spec, site = self._plan.workload.ops[op], self._plan.ops[op].site
                self._change(site, WORKSPACE, -spec.workspace_bytes, now_s)
                for name in spec.writes:
                    self._drop_others(name, site, now_s)
                self._free_dead((*spec.reads, *spec.writes), i, now_s)
            case Prefetch() | Reload():
                self._take(step.tensor, self._site, now_s, address=step.address)
            case Offload():
                self._take(step.tensor, self._targets[step.link], now_s)
            case Release():
                self._drop(step.tensor, self._site, now_s)
            case Wait():
                self._free_dead((step.tensor,), i, now_s)
        for name, tier in self._copy_ends.get(i, ()):
            self._drop(name, tier, now_s)

    def _free_dead(self, names: tuple[str, ...], i: int, now_s: float) -> None:
        for name in dict.fromkeys(names):
            if self._last.get(name) == i:
                for tier in self._held:
                    self._drop(name, tier, now_s)

    def _drop_others(self, name: str, site: str, now_s: float) -> None:
        """Free the copies that a write has made stale."""
        for tier in self._held:
            if tier != site:
                self._drop(name, tier, now_s)

    def _take(self, name: str, tier: str, now_s: float, *, address: int | None = None) -> None:
        if (name, tier) in self._copies or (name, tier) in self._homes:
            return
        spec = self._specs[name]
        size = spec.size_bytes if address is None else reserve_bytes(spec.size_bytes)
        self._copies[name, tier] = (_use_of(spec), size)
        self._change(tier, _use_of(spec), size, now_s)

    def _drop(self, name: str, tier: str, now_s: float) -> None:
        use, size = self._copies.pop((name, tier), (WEIGHTS, 0))
        self._change(tier, use, -size, now_s)

    def _change(self, tier: str, use: str, size_bytes: int, now_s: float) -> None:
        if size_bytes:
            self._held[tier][use] += size_bytes
            self._mark(tier, now_s)

    def _mark(self, tier: str, now_s: float) -> None:
        self._times[tier].append(now_s)
        for use, size_bytes in self._held[tier].items():
            self._columns[tier][use].append(size_bytes)


def _use_of(spec: TensorSpec) -> str:
    if spec.kind == TensorKind.WEIGHT:
        return STREAMED
    return STATES if spec.kind == TensorKind.STATE else ACTIVATIONS
