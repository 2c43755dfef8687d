"""The oracle and the interpreter on problems solved by hand, and against each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from gascompile.core.machine import Link, Machine, Pipe, Place
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import Workload
from tests.passes.move_oracle import least_limit, move_optimum
from tests.passes.planning import drive, task
from tests.passes.random_workloads import draw_case, op
from tests.passes.step_interpreter import Simulated, simulate


def two_drives(pipe: float, latency_s: float = 0.0) -> Machine:
    """Return a GPU with RAM and a drive that hold four bytes each, at a byte per second each."""
    links = tuple(
        Link(
            source_tier=tier,
            target_tier="gpu",
            bandwidth_bytes_per_s=1.0,
            latency_s=latency_s,
            shared=("bus",) if pipe else (),
        )
        for tier in ("cpu", "nvme")
    )
    places = (Place.named("gpu", 64), Place.named("cpu", 4), Place.named("nvme", 4))
    pipes = (Pipe(name="bus", bandwidth_bytes_per_s=pipe),) if pipe else ()
    return Machine(name="by hand", places=places, links=links, pipes=pipes)


def limits(machine: Machine, budget_bytes: int) -> dict[str, int]:
    """Return what each tier may hold."""
    sizes = {tier: spec.size_bytes for tier, spec in machine.tiers.items()}
    return {**sizes, machine.compute_tier: budget_bytes}


def best(workload: Workload, machine: Machine, budget_bytes: int) -> float:
    """Return the optimum, after its own plan has shown that it is reached."""
    allowed = limits(machine, budget_bytes)
    found = move_optimum(workload, machine, allowed)
    assert found is not None
    if found.seconds < math.inf:
        shown = simulate(workload, machine, found.steps, found.homes, limits_bytes=allowed)
        assert shown.seconds == pytest.approx(found.seconds, rel=1e-12)
    return found.seconds


TWO = task("u:weight:4 v:weight:4", op("f", 1, "u"), op("g", 1, "v"))
THREE = task("u:weight:4 v:weight:2 w:weight:2", op("f", 5, "u"), op("g", 5, "v"), op("h", 5, "w"))
STATE = task("m:state:4 w:weight:4", op("f", 1, "m", "m"), op("g", 1, "w"))
KEPT = task(
    "x:input:1 a:activation:4",
    op("f", 1, "x", "a"),
    op("g", 1, workspace_bytes=4),
    op("h", 1, "a"),
    repeats=False,
)
FIXED = task(
    "a:activation:4 s:state:1",
    op("f", 0, "s", "a s"),
    op("g", 2, "a"),
    op("h", 1, workspace_bytes=4),
    op("i", 1, "a"),
    repeats=False,
)

FEEDS = task(
    "x:input:1 a:activation:2 b:activation:2 s:state:2",
    op("f", 1, "x s", "a s"),
    op("g", 1, "a", "b"),
    op("h", 1, "b", workspace_bytes=2),
    repeats=False,
)


@pytest.mark.parametrize(
    ("workload", "machine", "budget_bytes", "seconds"),
    [
        # Both stay; or each op waits for its weight, as there is room for one.
        pytest.param(TWO, drive(), 8, 2.0, id="resident"),
        pytest.param(TWO, drive(), 4, 10.0, id="streamed"),
        pytest.param(TWO, drive(latency_s=0.5), 4, 11.0, id="latency"),
        pytest.param(TWO, drive(rate_in=0.0), 4, math.inf, id="no way in"),
        pytest.param(TWO, drive(), 3, math.inf, id="too small for one op"),
        # u arrives during h, v during f of the next iteration, w during g.
        pytest.param(THREE, drive(), 6, 15.0, id="across the end"),
        # v and w come after u has left: v is waited for 2 s, u 4 s.
        pytest.param(THREE, drive(), 4, 21.0, id="no room across the end"),
        # u leaves during f and comes back during h; without a way out it stays, and w is waited for.
        pytest.param(replace(THREE, repeats=False), drive(), 6, 15.0, id="out and back"),
        pytest.param(replace(THREE, repeats=False), drive(rate_out=0), 6, 17.0, id="once"),
        # In 4, f, out 4, w in 4, g: nothing overlaps in the room of one.
        pytest.param(STATE, drive(), 4, 14.0, id="dirty state"),
        pytest.param(STATE, drive(rate_in=2.0), 4, 10.0, id="dirty state, fast way in"),
        pytest.param(STATE, drive(rate_out=0.0), 4, math.inf, id="dirty state, no way out"),
        pytest.param(KEPT, drive(), 4, 4.0, id="recompute"),
        pytest.param(KEPT, drive(16.0, 16.0), 4, 3.5, id="offload"),
        pytest.param(KEPT, drive(0.0, 0.0), 4, 4.0, id="recompute without links"),
        # a need not be kept for a rerun of g that never comes.
        pytest.param(FEEDS, drive(0.0, 0.0), 6, 3.0, id="what a rerun could read goes"),
        # a leaves while g reads it: 4 s for both, h, 4 s back, i.
        pytest.param(FIXED, drive(), 5, 10.0, id="offload under an op"),
        pytest.param(FIXED, drive(0.0, 0.0), 5, math.inf, id="neither moved nor rerun"),
    ],
)
def test_optimum_by_hand(
    workload: Workload, machine: Machine, budget_bytes: int, seconds: float
) -> None:
    assert best(workload, machine, budget_bytes) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("pipe", "latency_s", "seconds"),
    [
        (0.0, 0.0, 6.0),
        # The pipe lets the second in when the first one's bytes would have passed: 4 s, 2 s, 2 s later.
        (1.0, 0.0, 10.0),
        (2.0, 0.0, 8.0),
        (2.0, 1.0, 9.0),
    ],
)
def test_two_weights_from_two_tiers(pipe: float, latency_s: float, seconds: float) -> None:
    ops = (op("f", 1, "u v"), op("g", 1, workspace_bytes=8))
    workload = task(
        "u:weight:4 v:weight:4", *(replace(at, time_s={"gpu": at.time_s["cpu"]}) for at in ops)
    )
    assert best(workload, two_drives(pipe, latency_s), 8) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("workload", "machine", "least"),
    [
        (TWO, drive(), 4),
        (TWO, drive(rate_in=0.0), 8),
        (STATE, drive(rate_out=0.0), 8),
        (KEPT, drive(0.0, 0.0), 4),
        # a, the state and h's workspace at once.
        (FIXED, drive(0.0, 0.0), 9),
        (FIXED, drive(), 5),
        (FEEDS, drive(0.0, 0.0), 6),
    ],
)
def test_smallest_feasible_limit(workload: Workload, machine: Machine, least: int) -> None:
    assert least_limit(workload, machine, limits(machine, 0)) == least
    assert best(workload, machine, least) < math.inf
    assert best(workload, machine, least - 1) == math.inf


def test_too_large_is_said() -> None:
    found = move_optimum(THREE, drive(), limits(drive(), 4), max_labels=3)
    assert found is None


# ---------------------------------------------------------------- the interpreter


def move(kind: type[Offload | Reload], place: int, name: str, size_bytes: int) -> Step:
    link = "cpu->nvme" if kind is Offload else "nvme->cpu"
    return kind(op=place, tensor=name, link=link, size_bytes=size_bytes)


def wait(place: int, name: str) -> Step:
    return Wait(op=place, tensor=name)


def release(place: int, name: str) -> Step:
    return Release(op=place, tensor=name)


def show(workload: Workload, *steps: Step, homes: dict[str, str] | None = None) -> Simulated:
    return simulate(workload, drive(), steps, homes or {})


def test_interpreter_counts_time_bytes_and_peak() -> None:
    """u crosses the end, v comes within the iteration; each waits 4 s."""
    steps = (
        wait(0, "u"),
        Compute(op=0),
        release(1, "u"),
        move(Reload, 1, "v", 4),
        wait(1, "v"),
        Compute(op=1),
        release(2, "v"),
        move(Reload, 2, "u", 4),
    )
    homes = {"u": "nvme", "v": "nvme"}
    found = simulate(TWO, drive(), steps, homes, limits_bytes={"cpu": 4})
    assert found.seconds == 10.0
    assert found.link_bytes == {"nvme->cpu": 8, "cpu->nvme": 0}
    assert found.peak_bytes == {"cpu": 4, "nvme": 8}
    with pytest.raises(AssertionError, match="cpu: 4 bytes in use, 3 allowed"):
        simulate(TWO, drive(), steps, homes, limits_bytes={"cpu": 3})


@pytest.mark.parametrize(
    ("workload", "steps", "homes", "message"),
    [
        (TWO, (Compute(op=1), Compute(op=0)), {}, "op 0 is next"),
        (TWO, (Compute(op=0),), {}, "not every op"),
        (TWO, (Compute(op=0), release(1, "u"), Compute(op=1)), {}, "only up-to-date copy"),
        (
            TWO,
            (move(Reload, 0, "u", 4), Compute(op=0), wait(1, "u"), release(1, "u"), Compute(op=1)),
            {"u": "nvme"},
            "u has not arrived",
        ),
        (
            TWO,
            (Compute(op=0), release(1, "u"), Compute(op=1)),
            {"u": "nvme"},
            "the end differs from the start",
        ),
        # The state's change is dropped: the copy on the drive is the old one.
        (
            STATE,
            (move(Reload, 0, "m", 4), wait(0, "m"), Compute(op=0), release(1, "m"), Compute(op=1)),
            {"m": "nvme"},
            "only up-to-date copy",
        ),
        (
            STATE,
            (move(Offload, 0, "m", 4), Compute(op=0), wait(1, "m"), Compute(op=1)),
            {},
            "written while it is in flight",
        ),
        (
            KEPT,
            (Compute(op=0), release(1, "a"), Compute(op=1), Compute(op=2)),
            {},
            "a is not there",
        ),
        (
            KEPT,
            (
                Compute(op=0),
                move(Offload, 1, "a", 4),
                release(1, "a"),
                Compute(op=1),
                Compute(op=2),
            ),
            {},
            "in flight",
        ),
        (
            FIXED,
            (*(Compute(op=i) for i in range(3)), Recompute(op=3, source=0), Compute(op=3)),
            {},
            "writes what it reads",
        ),
    ],
)
def test_interpreter_refuses(
    workload: Workload, steps: tuple[Step, ...], homes: dict[str, str], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        show(workload, *steps, homes=homes)


def test_rerun_on_a_changed_value_is_refused() -> None:
    """f read the state before g changed it."""
    workload = task(
        "s:state:1 a:activation:4",
        op("f", 1, "s", "a"),
        op("g", 1, "s", "s"),
        op("h", 1, "a"),
        repeats=False,
    )
    steps = (Compute(op=0), release(1, "a"), Compute(op=1), Recompute(op=2, source=0))
    with pytest.raises(AssertionError, match="s is out of date"):
        show(workload, *steps, Compute(op=2))


# ---------------------------------------------------------------- against each other


@pytest.mark.parametrize("block", range(6))
def test_optimum_is_reached_and_no_neighbour_is_faster(block: int) -> None:
    """The oracle's plan passes the interpreter in its time; changed at random it is never faster."""
    chance = random.Random(block)
    tried = 0
    for seed in range(25 * block, 25 * block + 25):
        case = draw_case(seed, max_tensors=5, max_ops=5)
        found = move_optimum(case.workload, case.machine, case.limits_bytes, max_labels=6_000)
        if found is None or found.seconds == math.inf:
            continue
        given = (case.workload, case.machine)
        shown = simulate(*given, found.steps, found.homes, limits_bytes=case.limits_bytes)
        assert shown.seconds == pytest.approx(found.seconds, rel=1e-9)
        for _ in range(40):
            steps = _changed(chance, found.steps, len(case.workload.ops))
            try:
                other = simulate(*given, steps, found.homes, limits_bytes=case.limits_bytes)
            except AssertionError:
                continue
            tried += 1
            assert other.seconds >= found.seconds - 1e-9, (seed, steps)
    assert tried > 20


def _changed(chance: random.Random, steps: tuple[Step, ...], num_ops: int) -> list[Step]:
    """Move up to three steps elsewhere, then number all places anew."""
    changed = list(steps)
    for _ in range(chance.randint(1, 3)):
        step = changed.pop(chance.randrange(len(changed)))
        changed.insert(chance.randint(0, len(changed)), step)
    place, numbered = 0, list[Step]()
    for step in changed:
        numbered.append(step if isinstance(step, Compute) else replace(step, op=place))
        place = min(num_ops, place + isinstance(step, Compute))
    return numbered
