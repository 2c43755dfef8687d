"""Ops that run where their weights rest: when, with which copies, and what no choice of sites beats."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.machine import Contention, InterferencePoint, Link, Machine, Place
from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Offload, Prefetch, Reload
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.bounds.site_limit import has_sites, site_limit
from gascompile.passes.bounds.site_segments import site_segments
from gascompile.passes.model.problem import problem
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.search.site_choices import able_weights, improved, least_done_s
from gascompile.passes.search.site_routes import closed

SIZE = 99 * 4096
"""A weight that takes 100 pages of the arena."""
ROOM = reserve_bytes(SIZE)


def machine(link_s: float) -> Machine:
    """Return a machine whose links take ``link_s`` for a weight; the slow tier computes as well."""
    rate = SIZE / link_s
    return Machine(
        name="two sites",
        places=(Place.named("gpu", 1 << 30), Place.named("cpu", 1 << 30)),
        links=(
            Link(source_tier="cpu", target_tier="gpu", bandwidth_bytes_per_s=rate),
            Link(source_tier="gpu", target_tier="cpu", bandwidth_bytes_per_s=rate),
        ),
    )


def chain(count: int, *, gpu_s: float, cpu_s: float | None, act_bytes: int = 4) -> Workload:
    """Return ``count`` ops, each with a weight of its own, on an activation that runs through all."""
    kinds = [TensorKind.INPUT, *[TensorKind.ACTIVATION] * (count - 1), TensorKind.OUTPUT]
    seconds = {"gpu": gpu_s} if cpu_s is None else {"gpu": gpu_s, "cpu": cpu_s}
    return Workload(
        name="chain",
        repeats=True,
        tensors=(
            *(
                TensorSpec(name=f"w{i}", size_bytes=SIZE, kind=TensorKind.WEIGHT)
                for i in range(count)
            ),
            *(
                TensorSpec(name=f"x{i}", size_bytes=act_bytes, kind=kind)
                for i, kind in enumerate(kinds)
            ),
        ),
        ops=tuple(
            OpSpec(name=f"op{i}", time_s=seconds, reads=(f"x{i}", f"w{i}"), writes=(f"x{i + 1}",))
            for i in range(count)
        ),
    )


def towers(layers: int, *, gpu_s: float, cpu_s: float) -> Workload:
    """Return two chains that need nothing of each other, and an op that joins them."""
    tensors = [TensorSpec(name="x", size_bytes=4, kind=TensorKind.INPUT)]
    ops: list[OpSpec] = []
    for side in "ab":
        for i in range(layers):
            reads = (f"{side}{i - 1}" if i else "x", f"w{side}{i}")
            tensors.append(TensorSpec(name=reads[1], size_bytes=SIZE, kind=TensorKind.WEIGHT))
            tensors.append(TensorSpec(name=f"{side}{i}", size_bytes=4, kind=TensorKind.ACTIVATION))
            seconds = {"gpu": gpu_s, "cpu": cpu_s}
            ops.append(
                OpSpec(name=f"op{side}{i}", time_s=seconds, reads=reads, writes=(f"{side}{i}",))
            )
    tensors.append(TensorSpec(name="y", size_bytes=4, kind=TensorKind.OUTPUT))
    ends = (f"a{layers - 1}", f"b{layers - 1}")
    ops.append(OpSpec(name="join", time_s={"gpu": 0.0, "cpu": 0.0}, reads=ends, writes=("y",)))
    return Workload(name="towers", repeats=True, tensors=tuple(tensors), ops=tuple(ops))


def planned(workload: Workload, link_s: float, num_resident: int) -> Plan:
    budget = Budget(gpu=(num_resident + 2) * ROOM + 100)
    return make_plan(workload, machine(link_s), budget, fingerprint={})


def test_an_op_runs_where_its_weight_rests_when_moving_it_takes_longer() -> None:
    plan = planned(chain(6, gpu_s=1.0, cpu_s=3.0), 10.0, 1)
    sites = [op.site for op in plan.ops]
    assert "cpu" in sites
    sent = {f"w{i}" for i, site in enumerate(sites) if site == "cpu"}
    assert all(plan.tensors[name].home == "cpu" for name in sent)
    assert not sent & {step.tensor for step in plan.steps if isinstance(step, Prefetch)}
    assert plan.certificate.predicted_s < 30.0


def test_activations_cross_once_each_way() -> None:
    # Three weights fit; the other three are cheaper to leave where they are than to load.
    plan = planned(chain(6, gpu_s=1.0, cpu_s=2.0), 1000.0, 1)
    sites = [op.site for op in plan.ops]
    out = [step.tensor for step in plan.steps if isinstance(step, Offload)]
    back = [step.tensor for step in plan.steps if isinstance(step, Reload)]
    assert sites.count("gpu") == 3
    changes = [(a, b) for a, b in itertools.pairwise([*sites, "gpu"]) if a != b]
    assert len(back) == sum(b == "gpu" for _, b in changes)
    assert len(out) == sum(b == "cpu" for _, b in changes)
    copies_s = 1000.0 * 4 / SIZE * (len(out) + len(back))
    assert plan.certificate.predicted_s == pytest.approx(3 * 1.0 + 3 * 2.0 + copies_s)


@pytest.mark.parametrize(("link_s", "num_resident"), [(0.5, 10), (1.0, 2), (1.0, 0)])
def test_halves_run_at_once(link_s: float, num_resident: int) -> None:
    plan = planned(towers(8, gpu_s=1.0, cpu_s=1.0), link_s, num_resident)
    sites = "".join(op.site[0] for op in plan.ops[:-1])
    assert sites in ("g" * 8 + "c" * 8, "c" * 8 + "g" * 8)
    # Eight seconds on each, and a few bytes that cross; a weight comes in the time of an op.
    assert plan.certificate.predicted_s == pytest.approx(8.0, rel=1e-4)
    assert plan.certificate.limit_s == pytest.approx(8.0)
    assert plan.peak_bytes["gpu"] <= plan.budget_bytes["gpu"]


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 3),
    cpu_s=st.sampled_from([0.5, 1.0, 3.0]),
    link_s=st.sampled_from([0.25, 1.0, 4.0]),
    num_resident=st.integers(0, 4),
)
def test_no_choice_of_sites_of_two_chains_beats_the_limit(
    layers: int, cpu_s: float, link_s: float, num_resident: int
) -> None:
    workload = towers(layers, gpu_s=1.0, cpu_s=cpu_s)
    names = [f"w{side}{i}" for side in "ab" for i in range(layers)]
    found, _ = site_limit(
        workload.ops,
        machine(link_s),
        dict.fromkeys(names, SIZE),
        num_resident * SIZE,
        {"cpu": 1 << 30},
    )
    # Of each chain some ops are sent; copies are for free and any op may wait for none but those before it.
    best = min(
        max(
            2 * layers - a - b,
            (a + b) * cpu_s,
            layers - a + a * cpu_s,
            layers - b + b * cpu_s,
            max(0, 2 * layers - a - b - num_resident) * link_s,
        )
        for a in range(layers + 1)
        for b in range(layers + 1)
    )
    assert found <= best * (1 + 1e-9)


def test_where_moving_is_cheaper_everything_runs_at_one_site() -> None:
    plan = planned(chain(6, gpu_s=1.0, cpu_s=50.0), 0.5, 1)
    assert {op.site for op in plan.ops} == {"gpu"}


def test_without_other_times_there_is_one_site() -> None:
    workload = chain(3, gpu_s=1.0, cpu_s=None)
    assert not has_sites(workload.ops, machine(1.0))
    assert {op.site for op in planned(workload, 10.0, 0).ops} == {"gpu"}


def test_an_op_with_a_state_is_not_sent() -> None:
    workload = chain(4, gpu_s=1.0, cpu_s=2.0)
    state = TensorSpec(name="s", size_bytes=8, kind=TensorKind.STATE)
    ops = [*workload.ops]
    ops[2] = OpSpec(
        name="op2", time_s={"gpu": 1.0, "cpu": 2.0}, reads=("x2", "w2", "s"), writes=("x3", "s")
    )
    held = Workload(name="held", repeats=True, tensors=(*workload.tensors, state), ops=tuple(ops))
    plan = make_plan(held, machine(100.0), Budget(gpu=2 * ROOM + 100), fingerprint={})
    assert plan.ops[2].site == "gpu"


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 6),
    gpu_s=st.sampled_from([0.0, 1.0, 2.0]),
    cpu_s=st.sampled_from([0.5, 1.0, 3.0, 9.0]),
    link_s=st.sampled_from([0.5, 2.0, 5.0, 20.0]),
    num_resident=st.integers(0, 4),
)
def test_no_choice_of_sites_beats_the_limit(
    count: int, gpu_s: float, cpu_s: float, link_s: float, num_resident: int
) -> None:
    workload = chain(count, gpu_s=gpu_s, cpu_s=cpu_s)
    arena_bytes = num_resident * SIZE
    found, _ = site_limit(
        workload.ops,
        machine(link_s),
        {f"w{i}": SIZE for i in range(count)},
        arena_bytes,
        {"cpu": 1 << 30},
    )
    # Every op is resident, loaded or sent; copies of activations are for free.
    best = min(
        max(
            (count - sent) * gpu_s + sent * cpu_s,
            max(0, count - num_resident - sent) * link_s,
        )
        for sent in range(count + 1)
    )
    assert found <= best * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(2, 6),
    cpu_s=st.sampled_from([0.5, 2.0, 6.0]),
    link_s=st.sampled_from([0.5, 3.0, 15.0]),
    num_resident=st.integers(0, 3),
)
def test_sites_never_make_a_plan_slower(
    count: int, cpu_s: float, link_s: float, num_resident: int
) -> None:
    one = planned(chain(count, gpu_s=1.0, cpu_s=None), link_s, num_resident)
    both = planned(chain(count, gpu_s=1.0, cpu_s=cpu_s), link_s, num_resident)
    assert both.certificate.predicted_s <= one.certificate.predicted_s * (1 + 1e-9)
    assert both.certificate.lower_bound_s <= both.certificate.predicted_s


def blocks(layers: int, width: int, *, seconds: float, act_bytes: int) -> Workload:
    """Return layers of two branches of ``width`` ops each between ops that join them; all take as long anywhere."""
    tensors = [TensorSpec(name="x", size_bytes=act_bytes, kind=TensorKind.INPUT)]
    ops: list[OpSpec] = []

    def run(name: str, reads: tuple[str, ...], kind: TensorKind = TensorKind.ACTIVATION) -> str:
        weights = (f"w{name}",) if len(reads) == 1 and name[0] != "n" else ()
        tensors.extend(TensorSpec(name=w, size_bytes=SIZE, kind=TensorKind.WEIGHT) for w in weights)
        tensors.append(TensorSpec(name=f"%{name}", size_bytes=act_bytes, kind=kind))
        spent_s = {"gpu": seconds, "cpu": seconds} if weights else {"gpu": 0.0, "cpu": 0.0}
        ops.append(
            OpSpec(name=name, time_s=spent_s, reads=(*reads, *weights), writes=(f"%{name}",))
        )
        return f"%{name}"

    x = "x"
    for layer in range(layers):
        ends = []
        y = run(f"n{layer}", (x,))
        for branch in "ab":
            value = y
            for i in range(width):
                value = run(f"{branch}{layer}_{i}", (value,))
            ends.append(value)
        last = TensorKind.OUTPUT if layer + 1 == layers else TensorKind.ACTIVATION
        x = run(f"j{layer}", tuple(ends), last)
    return Workload(name="blocks", repeats=True, tensors=tuple(tensors), ops=tuple(ops))


def test_segments_count_the_copies_of_each() -> None:
    # A layer has eight ops of a second, and a value crosses in half a second: four and a half seconds at one site,
    # three and a half at the other between its two copies.
    workload = blocks(3, 4, seconds=1.0, act_bytes=SIZE // 2)
    assert site_segments(workload, machine(1.0)) == pytest.approx(3 * 4.5)
    # Where a copy takes as long as half of the ops, one site does all.
    assert site_segments(workload, machine(8.0)) == pytest.approx(3 * 8.0)


def test_ops_in_the_order_of_their_ends_let_copies_start_in_time() -> None:
    # Of each layer the one site has four seconds, the other three and two copies of 0.4: the last comes in time,
    # though in the order of the program it would start behind the four.
    workload = blocks(3, 4, seconds=1.0, act_bytes=SIZE // 10 * 4)
    plan = planned(_lighter(workload), 1.0, 30)
    assert {op.site for op in plan.ops} == {"gpu", "cpu"}
    assert plan.certificate.predicted_s == pytest.approx(3 * 4.0, rel=1e-3)
    assert [op.name for op in plan.ops] != [op.name for op in workload.ops]
    for site in ("gpu", "cpu"):
        here = {op.name for op in plan.ops if op.site == site}
        before = [op.name for op in workload.ops if op.name in here]
        assert before == [op.name for op in plan.ops if op.name in here]


def test_weights_that_one_op_reads_change_sites_together() -> None:
    plain = towers(3, gpu_s=1.0, cpu_s=1.0)
    linear = {op.name for op in plain.ops if op.name != "join"}
    ops = (
        replace(op, reads=(*op.reads, f"bias {op.name}")) if op.name in linear else op
        for op in plain.ops
    )
    biases = (
        TensorSpec(name=f"bias {name}", size_bytes=4096, kind=TensorKind.WEIGHT)
        for name in sorted(linear)
    )
    workload = replace(plain, tensors=(*plain.tensors, *biases), ops=tuple(ops))
    task = problem(workload, machine(1.0), Budget(gpu=20 * ROOM))
    able = able_weights(task, "cpu")
    sent = improved(task, "cpu", frozenset(), able, least_done_s)
    # Of six ops the one site does three while the other does the rest.
    assert least_done_s(task, "cpu", sent) == pytest.approx(3.0, rel=1e-3)
    assert closed(task, sent, "cpu") == sent


def _lighter(workload: Workload) -> Workload:
    """Return a workload of ``blocks`` whose second branches take three quarters of the first ones' time."""
    ops = (
        replace(op, time_s={site: 0.75 * s for site, s in op.time_s.items()})
        if op.name[0] == "b"
        else op
        for op in workload.ops
    )
    return replace(workload, ops=tuple(ops))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_order_and_no_sites_of_any_ops_beat_the_segments(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    link_s = data.draw(st.sampled_from([0.1, 0.5, 2.0]))
    tensors = [TensorSpec(name="x", size_bytes=4, kind=TensorKind.INPUT)]
    ops: list[OpSpec] = []
    for i in range(count):
        known = [f"%o{k}" for k in range(i)]
        reads = (
            data.draw(st.lists(st.sampled_from(known), max_size=2, unique=True)) if known else []
        )
        seconds = {"gpu": data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))}
        if data.draw(st.booleans()) or i == 0:
            seconds["cpu"] = data.draw(st.sampled_from([0.5, 1.0, 3.0]))
        kind = TensorKind.OUTPUT if i + 1 == count else TensorKind.ACTIVATION
        size_bytes = data.draw(st.sampled_from([SIZE // 10, SIZE]))
        tensors.append(TensorSpec(name=f"%o{i}", size_bytes=size_bytes, kind=kind))
        ops.append(
            OpSpec(
                name=f"o{i}",
                time_s=seconds,
                reads=tuple(reads) or ("x",),
                writes=(f"%o{i}",),
                flops=data.draw(st.sampled_from([0, 100])),
                read_bytes=10,
            )
        )
    workload = Workload(name="any", repeats=True, tensors=tuple(tensors), ops=tuple(ops))
    where = machine(link_s)
    if lost := data.draw(st.sampled_from([(), (0.1, 0.3), (0.4, 0.2)])):
        points = (
            InterferencePoint(flops_per_byte=10.0 * i, lost_share=s) for i, s in enumerate(lost)
        )
        where = replace(where, contention=Contention(points=tuple(points)))
    found = site_segments(workload, where)
    assert found <= _least_s(workload, where, lost) * (1 + 1e-9)


def _least_s(workload: Workload, two_sites: Machine, lost: tuple[float, ...]) -> float:
    """Return the least seconds over all sites of ops and all orders in which they can run.

    Beside another site an op loses the first share of its speed where it has no FLOPs, else the second.
    """
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    ops, best = workload.ops, float("inf")
    for sites in itertools.product(*(sorted(op.time_s) for op in ops)):
        site_of = {f"%{op.name}": site for op, site in zip(ops, sites, strict=True)}
        busy_s = dict.fromkeys(("gpu", "cpu"), 0.0)
        for op, site in zip(ops, sites, strict=True):
            busy_s[site] += op.time_s[site]
        times_s = []
        for op, site in zip(ops, sites, strict=True):
            share = lost[op.flops > 0] if lost else 0.0
            other_s = busy_s["cpu" if site == "gpu" else "gpu"]
            beside = min(1.0, other_s / busy_s[site]) if busy_s[site] else 0.0
            times_s.append(op.time_s[site] * (1 - beside + beside / (1 - share)))
        for order in itertools.permutations(range(len(ops))):
            free_s, made_s = {"gpu": 0.0, "cpu": 0.0}, dict[str, float]()

            def there_s(
                name: str,
                site: str,
                made_s: dict[str, float] = made_s,
                of: dict[str, str] = site_of,
            ) -> float:
                if name == "x" or of[name] == site:
                    return made_s.get(name, 0.0)
                link = two_sites.link(f"{of[name]}->{site}")
                return made_s[name] + link.transfer_time_s(sizes[name])

            for i in order:
                op, site = ops[i], sites[i]
                if any(name != "x" and name not in made_s for name in op.reads):
                    break
                begun_s = max(free_s[site], *(there_s(name, site) for name in op.reads))
                free_s[site] = made_s[op.writes[0]] = begun_s + times_s[i]
            else:
                best = min(best, max(*free_s.values(), there_s(ops[-1].writes[0], "gpu")))
    return best
