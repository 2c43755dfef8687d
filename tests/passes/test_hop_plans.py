"""Weights that come in two hops: by an interpreter, by brute force, and by plans that are spoilt on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.errors import PlanVerificationError
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Evict, Fetch, Prefetch, Step, Wait
from gascompile.core.workload import PERSISTENT, Workload
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.cost_models.simulate.trace import trace
from gascompile.passes.explain.whatif import whatif
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify
from tests.hop_plans import hop_plan, on_gpu
from tests.passes.planning import PAGE, least_budget, workload, workloads
from tests.passes.step_interpreter import Simulated, simulate
from tests.runtime.devices.machines import accelerator
from tests.scale import SCALE

MACHINE = accelerator(up=240e6, down=240e6, nvme=60e6, latency_s=1e-4)
"""A page takes 17 us from the host and 68 us from the drive."""
SLOT = 100 * PAGE


def interpreted(plan: Plan) -> Simulated:
    """Return what an interpreter that shares no code with the planner says of a plan."""
    own = plan.machine.compute_tier
    persistent = {n: t for n, t in plan.tensors.items() if t.kind in PERSISTENT}
    return simulate(
        plan.workload,
        plan.machine,
        plan.steps,
        {name: at.home for name, at in persistent.items()},
        arena_bytes=plan.arena_bytes[own],
        residents={n: at.address for n, at in persistent.items() if at.address is not None},
        middle_bytes={n: size for n, size in plan.arena_bytes.items() if n != own},
    )


def has_hops(plan: Plan) -> bool:
    return any(isinstance(step, Fetch) for step in plan.steps)


def small_cpu(task: Workload, share: float) -> int:
    """Return so much of what the weights take."""
    return int(share * sum(t.size_bytes for t in task.tensors if t.kind in PERSISTENT))


# ---------------------------------------------------------------- one meaning


@settings(max_examples=60 * SCALE)
@given(workloads(), st.integers(0, 1000))
def test_what_is_planned_is_what_happens(task: Workload, seed: int) -> None:
    plan = hop_plan(on_gpu(task), MACHINE, seed, num_residents=seed % 3)
    if not has_hops(plan):
        return
    verify(plan)
    seen = interpreted(plan)
    assert seen.seconds == pytest.approx(replay_plan(plan).seconds, rel=1e-9, abs=1e-12)
    assert seen.link_bytes == plan.link_bytes
    assert seen.peak_bytes == plan.peak_bytes
    drawn = trace(plan)
    assert all(drawn.memory[t].peak_bytes <= plan.peak_bytes[t] for t in drawn.memory)
    fetched = sum(step.size_bytes for step in plan.steps if isinstance(step, Fetch))
    had = (t for t in drawn.transfers if t.kind == "fetch" and t.wait_op is not None)
    assert fetched == sum(t.size_bytes for t in had)


def test_a_plan_in_two_hops_is_kept_whole(tmp_path: Path) -> None:
    plan = hop_plan(on_gpu(workload(list("abca"), seconds=1e-3)), MACHINE, 3)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    assert '"place": "cpu"' in text or '"place":"cpu"' in text
    assert plan.arena_bytes["cpu"] > 0


def test_ops_wait_for_the_hop_that_is_late() -> None:
    # A drive that is the slower of the two is what ops wait for, though the push is what comes late.
    plan = make_plan(
        chain_of("abcdef", 5e-3), MACHINE, Budget(gpu=SLOT, cpu=2 * SLOT), fingerprint={}
    )
    assert has_hops(plan)
    stalls = trace(plan).stalls
    assert stalls
    assert {stall.link for stall in stalls if stall.time_s > 1e-4} == {"nvme->cpu"}


# ---------------------------------------------------------------- what the search finds


@settings(max_examples=12 * SCALE)
@given(workloads(), st.sampled_from([0.0, 0.1, 0.3, 0.6]), st.sampled_from([0.2, 0.4, 0.7]))
def test_two_hops_never_make_a_plan_slower(task: Workload, share: float, cpu: float) -> None:
    task = on_gpu(task)
    least = least_budget(task, MACHINE)
    whole = sum(t.size_bytes for t in task.tensors)
    budget = Budget(gpu=least + int(share * whole), cpu=small_cpu(task, cpu))
    plan, direct = (
        make_plan(task, MACHINE, budget, fingerprint={}, has_hops=allowed)
        for allowed in (True, False)
    )
    assert not has_hops(direct)
    assert plan.certificate.predicted_s <= direct.certificate.predicted_s * (1 + 1e-9)
    if has_hops(plan):
        assert interpreted(plan).peak_bytes == plan.peak_bytes
    assert not [note for note in plan.warnings if "dropped" in note]


@settings(max_examples=8 * SCALE)
@given(workloads(), st.lists(st.floats(0, 1), min_size=2, max_size=4), st.floats(0.2, 0.8))
def test_more_memory_is_never_slower(task: Workload, shares: list[float], cpu: float) -> None:
    task = on_gpu(task)
    least, whole = least_budget(task, MACHINE), sum(t.size_bytes for t in task.tensors)
    times = []
    for share in sorted(shares):
        budget = Budget(gpu=least + int(share * whole), cpu=small_cpu(task, cpu))
        plan = make_plan(task, MACHINE, budget, fingerprint={}, mip_gap=0.0)
        times.append(plan.certificate.predicted_s)
    assert all(slower >= faster * (1 - 1e-9) for slower, faster in pairwise(times)), times


def chain_of(letters: str, time_s: float, *, repeats: bool = True) -> Workload:
    return on_gpu(workload(list(letters), seconds=time_s, repeats=repeats))


def test_a_drive_is_read_while_the_computing_memory_is_full() -> None:
    # One weight at a time fits. The drive takes 6.86 ms for one, the host 1.79 ms, an op 5 ms: they take turns where
    # nothing waits half the way, and where two do the drive never rests.
    task = chain_of("abcdef", 5e-3)
    budget = Budget(gpu=SLOT, cpu=2 * SLOT)
    direct = make_plan(task, MACHINE, budget, fingerprint={}, has_hops=False)
    plan = make_plan(task, MACHINE, budget, fingerprint={})
    drive_s, host_s = (
        MACHINE.link(f"{x}->gpu").transfer_time_s(99 * PAGE) for x in ("nvme", "cpu")
    )
    assert direct.certificate.predicted_s == pytest.approx(
        6 * 5e-3 + 4 * drive_s + 2 * host_s, rel=1e-6
    )
    assert has_hops(plan)
    assert plan.arena_bytes["cpu"] == 2 * SLOT
    assert plan.certificate.predicted_s == pytest.approx(6 * drive_s, rel=0.02)


def test_what_would_help_a_plan_in_two_hops_is_planned_like_it() -> None:
    plan = make_plan(
        chain_of("abcdef", 5e-3), MACHINE, Budget(gpu=SLOT, cpu=2 * SLOT), fingerprint={}
    )
    assert has_hops(plan)
    found = whatif(plan, time_limit_s=0.5)
    assert found.base_s == pytest.approx(plan.certificate.predicted_s)
    assert all(variant.change_s <= 1e-12 for variant in found.of("bandwidth") if variant.change_s)


def test_a_weight_of_several_uses_is_read_once() -> None:
    # Two weights at a time are used three times in turn, and the computing memory holds one: nine reads of a drive
    # where three of six are at home in between, six at most where they take turns there.
    task = chain_of("abababcdcdcdefefef", 1e-3)
    budget = Budget(gpu=SLOT, cpu=3 * SLOT)
    plan = make_plan(task, MACHINE, budget, fingerprint={})
    direct = make_plan(task, MACHINE, budget, fingerprint={}, has_hops=False)
    assert 0 < plan.link_bytes["nvme->cpu"] <= 6 * 99 * PAGE
    assert plan.link_bytes["nvme->gpu"] == 0
    assert plan.link_bytes["cpu->gpu"] > 2 * plan.link_bytes["nvme->cpu"]
    assert direct.link_bytes["nvme->gpu"] == 9 * 99 * PAGE
    assert plan.certificate.predicted_s < 0.8 * direct.certificate.predicted_s


# ---------------------------------------------------------------- what is refused


def spoilt(plan: Plan, change: Callable[[list[Step]], list[Step]]) -> Plan:
    return replace(plan, steps=tuple(change(list(plan.steps))))


def renumbered(steps: list[Step]) -> list[Step]:
    """Return steps that name the op they stand before."""
    op, found = 0, []
    for step in steps:
        found.append(replace(step, op=op))
        op += isinstance(step, Compute)
    return found


@pytest.fixture
def once() -> Plan:
    """Return a plan of a list that runs once, with all of its steps in plain order."""
    task = chain_of("abcdef", 5e-3, repeats=False)
    plan = make_plan(task, MACHINE, Budget(gpu=SLOT, cpu=2 * SLOT), fingerprint={})
    assert has_hops(plan)
    return plan


def index(plan: Plan, kind: type[Step], tensor: str) -> int:
    return next(
        i
        for i, s in enumerate(plan.steps)
        if isinstance(s, kind) and getattr(s, "tensor", "") == tensor
    )


def test_what_is_freed_early_is_refused(once: Plan) -> None:
    name = next(s.tensor for s in once.steps if isinstance(s, Fetch))
    gone = index(once, Evict, name)
    waited = max(
        i for i, s in enumerate(once.steps[:gone]) if isinstance(s, Wait) and s.tensor == name
    )

    def early(steps: list[Step]) -> list[Step]:
        evict = steps.pop(gone)
        steps.insert(waited, evict)
        return renumbered(steps)

    with pytest.raises(PlanVerificationError, match="while it is being pushed on"):
        verify(spoilt(once, early))


def test_what_is_pushed_before_it_is_read_is_refused(once: Plan) -> None:
    name = next(s.tensor for s in once.steps if isinstance(s, Fetch))
    read, pushed = index(once, Fetch, name), index(once, Prefetch, name)

    def late(steps: list[Step]) -> list[Step]:
        fetch = steps.pop(read)
        steps.insert(pushed, fetch)
        return renumbered(steps)

    with pytest.raises(PlanVerificationError, match=r"pushes .* where it is not"):
        verify(spoilt(once, late))
    never = [s for s in once.steps if not (isinstance(s, Fetch) and s.tensor == name)]
    # Without any fetch of it, it comes over a link that is not its home's.
    with pytest.raises(PlanVerificationError, match="but it goes from 'nvme'"):
        verify(spoilt(once, lambda _: never))


def test_an_arena_in_between_has_one_owner_per_byte(once: Plan) -> None:
    with pytest.raises(PlanVerificationError, match="still has"):
        verify(
            spoilt(
                once,
                lambda steps: [
                    replace(s, address=0) if isinstance(s, Fetch | Evict) else s for s in steps
                ],
            )
        )
    small = once.with_accounts(arena_bytes={**once.arena_bytes, "cpu": SLOT})
    with pytest.raises(PlanVerificationError, match="whole pages of the"):
        verify(small)
    with pytest.raises(PlanVerificationError, match="has arenas in"):
        verify(once.with_accounts(arena_bytes={"gpu": once.arena_bytes["gpu"]}))
    with pytest.raises(PlanVerificationError, match="its steps need"):
        verify(once.with_accounts(peak_bytes={**once.peak_bytes, "cpu": 0}))
    with pytest.raises(PlanVerificationError, match="its budget leaves"):
        verify(once.with_accounts(budget_bytes={**once.budget_bytes, "cpu": SLOT}))


def test_what_is_never_evicted_or_had_is_refused(once: Plan) -> None:
    name = next(s.tensor for s in once.steps if isinstance(s, Fetch))
    gone = max(i for i, s in enumerate(once.steps) if isinstance(s, Evict) and s.tensor == name)
    with pytest.raises(PlanVerificationError, match=r"not evicted|fetches .* again|still has"):
        verify(spoilt(once, lambda steps: steps[:gone] + steps[gone + 1 :]))
    last = len(once.ops)
    fetch, evict = once.steps[index(once, Fetch, name)], once.steps[index(once, Evict, name)]
    idle = [replace(step, op=last) for step in (fetch, evict)]
    with pytest.raises(PlanVerificationError, match="nobody has had of it"):
        verify(spoilt(once, lambda steps: [*steps, *idle]))


def test_a_written_weight_has_no_copy_half_the_way(once: Plan) -> None:
    name = next(s.tensor for s in once.steps if isinstance(s, Fetch))
    first = once.workload.ops[0]
    ops = (replace(first, writes=(*first.writes, name)), *once.workload.ops[1:])
    changed = replace(once, workload=replace(once.workload, ops=ops))
    with pytest.raises(PlanVerificationError, match="whose copy in the arena is clean"):
        verify(changed)


def test_a_hop_leads_from_home_to_a_nearer_place(once: Plan) -> None:
    link = once.machine.link("nvme->cpu")
    without = replace(once.machine, links=tuple(x for x in once.machine.links if x != link))
    with pytest.raises((PlanVerificationError, KeyError)):
        verify(replace(once, machine=without))

    def there(step: Step) -> Step:
        return replace(step, place="nvme") if isinstance(step, Fetch) else step

    with pytest.raises(PlanVerificationError):
        verify(spoilt(once, lambda steps: [there(s) for s in steps]))
    name = next(s.tensor for s in once.steps if isinstance(s, Fetch))
    at_home = {**once.tensors, name: replace(once.tensors[name], home="cpu")}
    with pytest.raises(PlanVerificationError):
        verify(replace(once, tensors=at_home))
