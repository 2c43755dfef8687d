"""A plan's run equals eager, whatever the plan and the timing, and reports what it did."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gascompile.core.errors import PlanMismatchError
from gascompile.core.machine import IoSettings
from gascompile.core.plan import Plan
from gascompile.core.steps import Prefetch, Release, Step
from gascompile.passes.graph.insert import insert
from gascompile.runtime.protocols import read_at
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests.runtime.toys import (
    LINK,
    Toy,
    assert_runs,
    aten,
    make_plan,
    make_program,
    make_workload,
    mlp,
    save_weights,
    stamp,
)


def random_residents(toy: Toy, seed: int) -> frozenset[str]:
    rng = random.Random(seed)
    return frozenset(name for name in toy.weights if rng.random() < seed % 4 / 4)


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_results_bytes_and_twin(tmp_path: Path, seed: int, repeats: bool) -> None:
    toy = mlp(tmp_path, repeats=repeats)
    residents = random_residents(toy, seed)
    io = IoSettings(num_threads=seed % 4 + 1, chunk_bytes=8192)
    plan = make_plan(toy.workload, residents=residents, seed=seed, io=io)
    loaded = sum(toy.sources[name].size_bytes for name in residents)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        twin = toy.executor(session, plan, overlap=False)
        for run in range(3):
            assert_runs(executor, toy)
            report = executor.last_run
            assert report is not None
            assert report.link_bytes[LINK] == plan.link_bytes[LINK] + (0 if run else loaded)
            assert report.paths == {LINK: "O_DIRECT"}
            assert report.stall_s == sum(stall.time_s for stall in report.stalls)
            assert report.share_of_limit == plan.certificate.limit_s / report.seconds
            assert report.process_peak_bytes > session.arena.size_bytes
        x = torch.randn(4, 96)
        for ours, other in zip(executor.run(x), twin.run(x), strict=True):
            assert torch.equal(ours, other)
        assert twin.last_run is not None
        assert twin.last_run.link_bytes[LINK] == plan.link_bytes[LINK]


def test_random_delays_change_nothing(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    rng = random.Random(5)

    def delayed(descriptor: int, into: memoryview, offset: int, /) -> int:
        time.sleep(rng.random() * 1e-3)
        return read_at(descriptor, into, offset)

    for seed in range(6):
        io = IoSettings(num_threads=3, chunk_bytes=8192)
        residents = random_residents(toy, seed)
        plan = make_plan(toy.workload, residents=residents, seed=seed, io=io)
        with toy.session(plan, reader=delayed) as session:
            assert_runs(toy.executor(session, plan), toy, runs=6)


def test_poison_shows_an_early_release(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    steps: list[Step] = list(plan.steps)
    at = next(
        i for i, s in enumerate(steps) if isinstance(s, Release) and s.tensor == "layers.2.weight"
    )
    # The op before the release is the last reader: swapped, it reads spoiled bytes.
    release = steps.pop(at)
    compute = max(i for i in range(at) if type(steps[i]).__name__ == "Compute")
    module = insert(toy.program, plan)
    nodes = list(module.graph.nodes)
    node = next(
        n for n in nodes if n.target.__class__.__name__ == "function" and _is_release(n, release)
    )
    reader = next(n for n in nodes if n.name == plan.ops[steps[compute].op].name)
    reader.prepend(node)
    module.recompile()
    with toy.session(plan) as session:
        (tied, _) = Executor(session, module, plan, paranoid=True).run(torch.randn(4, 96))
    assert torch.isnan(tied).any()


def _is_release(node: torch.fx.Node, step: Step) -> bool:
    assert isinstance(step, Release)
    return node.name.startswith("release") and node.args[1:] == (step.tensor, step.address)


def test_two_executors_take_turns(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    residents = frozenset(["layers.1.weight", "layers.0.bias"])
    plans = [make_plan(toy.workload, residents=residents, seed=seed) for seed in (1, 2)]
    size = max(plan.arena_bytes["cpu"] for plan in plans)
    plans = [plan.with_accounts(arena_bytes={"cpu": size}) for plan in plans]
    with toy.session(plans[0]) as session:
        executors = [toy.executor(session, plan) for plan in plans]
        for turn in (0, 1, 1, 0, 0, 1, 0):
            assert_runs(executors[turn], toy)
        report = executors[0].last_run
        assert report is not None
        assert report.link_bytes[LINK] == plans[0].link_bytes[LINK]


def test_calls_from_two_threads_are_serialised(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, seed=3)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                assert_runs(executor, toy, runs=8)
            except AssertionError as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_the_graph_runs_by_itself(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(["layers.3.weight"]), seed=4)
    module = insert(toy.program, plan)
    with toy.session(plan) as session:
        executor = Executor(session, module, plan, paranoid=True)
        for _ in range(3):
            x = torch.randn(4, 96)
            for ours, eager in zip(module(executor.mover, x), toy.eager(x), strict=True):
                torch.testing.assert_close(ours, eager)


# ---------------------------------------------------------------- memory


def profiled_peak_bytes(run: Any) -> int:
    """Return the peak of what torch's allocator held on top of what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    assert kept
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("seed", range(3))
def test_peak_is_what_the_allocator_says(tmp_path: Path, seed: int) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=random_residents(toy, seed), seed=seed)
    x = torch.randn(4, 96)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan, paranoid=False)
        executor.run(x)
        measured = profiled_peak_bytes(lambda: executor.run(x))
        assert executor.last_run is not None
        assert executor.last_run.peak_bytes == {"cpu": plan.arena_bytes["cpu"] + measured}


def test_workspace_counts(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plain = make_plan(toy.workload)
    ops = list(plain.workload.ops)
    ops[3] = dataclasses.replace(ops[3], workspace_bytes=1 << 20)
    workload = dataclasses.replace(plain.workload, ops=tuple(ops))
    plan = dataclasses.replace(plain, workload=workload)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        executor.run(torch.randn(4, 96))
        assert executor.last_run is not None
        peak = executor.last_run.peak_bytes["cpu"] - plan.arena_bytes["cpu"]
        # The first sum and what op 3 makes of it, live while op 3 uses its workspace.
        assert peak == (1 << 20) + 2 * 4 * 96 * 4


# ---------------------------------------------------------------- values of every kind


def build(
    folder: Path,
    weights: dict[str, torch.Tensor],
    inputs: list[torch.Tensor],
    body: Any,
    states: dict[str, torch.Tensor] | None = None,
) -> tuple[Toy, Plan, Session]:
    states = states or {}
    program = make_program({**weights, **states}, inputs, body, frozenset(states))
    path = folder / "weights.safetensors"
    sources = save_weights(path, weights)
    toy = Toy(program, {**weights, **states}, sources, path, make_workload(program))
    plan = make_plan(toy.workload, residents=frozenset(states), merge=0.0)
    tensors = {
        name: dataclasses.replace(tensor, address=None) if name in states else tensor
        for name, tensor in plan.tensors.items()
    }
    plan = dataclasses.replace(plan, tensors=tensors)
    session = Session.for_plan(plan, sources=sources, stamps=(stamp(path),), states=states)
    return toy, plan, session


def call(x: torch.fx.Proxy, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Proxy:
    return x.tracer.create_proxy("call_function", target, args, kwargs)


def test_outputs_never_alias_weights_but_may_be_inputs(tmp_path: Path) -> None:
    w = torch.randn(6, 5)

    def body(p: dict[str, torch.fx.Proxy], x: torch.fx.Proxy) -> Sequence[torch.fx.Proxy]:
        view = call(x, aten.t.default, p["w"])
        product = call(x, aten.mm.default, x, view)
        again = call(x, aten.t.default, p["w"])
        return x, view, product, again, call(x, aten.t.default, x)

    x = torch.randn(3, 5)
    toy, plan, session = build(tmp_path, {"w": w}, [x], body)
    with session:
        executor = toy.executor(session, plan)
        for _ in range(3):
            same, view, product, again, turned = executor.run(x)
            assert same is x
            assert turned.data_ptr() == x.data_ptr()
            assert not any(session.arena.contains(t) for t in (view, product, again))
            torch.testing.assert_close((view, again), (w.t(), w.t()))
            torch.testing.assert_close(product, x @ w.t())


def test_states_are_updated_in_place_and_outputs_are_copies(tmp_path: Path) -> None:
    w, state = torch.randn(4), torch.zeros(4)

    def body(p: dict[str, torch.fx.Proxy], x: torch.fx.Proxy) -> Sequence[torch.fx.Proxy]:
        total = call(x, aten.add_.Tensor, p["state"], call(x, aten.mul.Tensor, x, p["w"]))
        return total, call(x, aten.mul.Tensor, total, 2.0)

    x = torch.ones(4)
    toy, plan, session = build(tmp_path, {"w": w}, [x], body, {"state": state})
    with session:
        executor = toy.executor(session, plan)
        first, _ = executor.run(x)
        second, double = executor.run(x)
        assert state is session.resident("state")
        torch.testing.assert_close(state, 2 * w)
        torch.testing.assert_close((first, second, double), (w, 2 * w, 4 * w))
        assert executor.last_run is not None
        peak = executor.last_run.peak_bytes["cpu"]
        assert peak == plan.arena_bytes["cpu"] + 16 + 2 * 16


def test_tuples_lists_slices_and_keywords(tmp_path: Path) -> None:
    import operator

    w = torch.randn(6, 4, dtype=torch.float64)

    def body(p: dict[str, torch.fx.Proxy], x: torch.fx.Proxy) -> Sequence[torch.fx.Proxy]:
        parts = call(x, aten.split.Tensor, x, 2)
        top = call(x, aten.topk.default, x, 1, dim=0)
        values = call(x, operator.getitem, top, 0)
        some = [call(x, operator.getitem, parts, i) for i in range(3)]
        joined = call(x, aten.cat.default, [some[2], values, some[0]], dim=0)
        rows = call(x, aten.sym_size.int, joined, 0)
        biased = call(x, aten.linear.default, joined, weight=p["w"])
        picked = call(x, operator.getitem, biased, (slice(None, rows, 2), slice(1, 3)))
        filled = call(x, aten.full.default, [rows, 2], 1.5, dtype=torch.float64)
        return picked, filled

    x = torch.randn(6, 4, dtype=torch.float64)
    toy, plan, session = build(tmp_path, {"w": w}, [x], body)
    with session:
        executor = toy.executor(session, plan)
        for _ in range(2):
            torch.testing.assert_close(executor.run(x), toy.eager(x))


def test_inputs_that_need_gradients_are_taken(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    with toy.session(plan) as session:
        tied, _ = toy.executor(session, plan).run(torch.randn(4, 96, requires_grad=True))
        assert not tied.requires_grad
        (tied + 1).sum()


def test_wrong_number_of_inputs(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        with pytest.raises(PlanMismatchError, match="takes 1 inputs, not 2"):
            executor.run(torch.randn(4, 96), 3)
        assert_runs(executor, toy)


def test_prefetch_that_nobody_waits_for_is_refused(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    module = insert(toy.program, plan)
    stray = Prefetch(op=0, tensor="layers.0.bias", link=LINK, size_bytes=384, address=1 << 30)
    plan = dataclasses.replace(plan, steps=(stray, *plan.steps))
    with toy.session(plan) as session, pytest.raises(PlanMismatchError, match="never waits"):
        Executor(session, module, plan)


def test_graph_of_another_plan_is_refused(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    with (
        toy.session(plan) as session,
        pytest.raises(PlanMismatchError, match="no mover"),
    ):
        Executor(session, toy.program.graph_module, plan)
