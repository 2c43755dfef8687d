"""Graphs on the stand-in for CUDA: when they are captured and replayed, and what happens where they cannot be."""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from gascompile.core.plan import Plan
from gascompile.passes.graph.insert import insert
from gascompile.runtime.devices import graph_rules
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.schedule import RunStep
from gascompile.runtime.run.session import Session
from tests.runtime.devices.fake_cuda import FakeApi, FakeRuntime, fake_cuda
from tests.runtime.devices.fake_graphs import FakeGraph
from tests.runtime.devices.test_cuda import MACHINE, WIDTH, assert_equal, inputs, plan_over
from tests.runtime.toys import Toy, make_plan, make_program, make_workload, mlp, save_weights

aten = torch.ops.aten
Body = Callable[..., Sequence[fx.Proxy]]


def executor_on(
    toy: Toy, session: Session, plan: Plan, *, graphs: bool = True, measure: bool = True
) -> Executor:
    return Executor(session, insert(toy.program, plan), plan, graphs=graphs, measure=measure)


def make_toy(folder: Path, body: Body, *user: torch.Tensor) -> tuple[Toy, Plan]:
    """Return a toy of two weights, ``w`` and ``v``, that stay, and its plan."""
    weights = {"w": torch.randn(WIDTH, WIDTH) / WIDTH**0.5, "v": torch.randn(WIDTH)}
    program = make_program(weights, user, body)
    path = folder / "toy.safetensors"
    toy = Toy(program, weights, save_weights(path, weights), path, make_workload(program))
    return toy, make_plan(toy.workload, residents=frozenset(weights), machine=MACHINE)


def call(x: fx.Proxy, target: Callable[..., object], *args: object) -> fx.Proxy:
    return x.tracer.create_proxy("call_function", target, args, {})


def session_of(toy: Toy, plan: Plan, api: FakeApi) -> Session:
    return toy.session(plan, device=CudaDevice(api=api))


# ---------------------------------------------------------------- captured and replayed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tiers", [{"cpu"}, {"nvme"}, {"cpu", "nvme"}], ids=["cpu", "nvme", "both"])
def test_the_second_run_captures_and_later_ones_replay(
    tmp_path: Path, tiers: set[str], seed: int
) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, tiers, seed)
    api, cuda = fake_cuda()
    results = []
    with session_of(toy, plan, api) as session:
        executor = executor_on(toy, session, plan, measure=False)
        for run in range(6):
            if run == 3:
                waited, allocated = cuda.main_waits(), len(cuda.allocations)
            x = inputs()
            results.append((executor.run(x), toy.eager(x)))
            report = executor.graph_report
            assert report is not None
            assert (report.num_graphs > 0, bool(report.reason)) == (run > 0, run == 0)
            assert [graph.num_replays for graph in cuda.captured] == [run] * report.num_graphs
        assert report is not None
        # A view that lies alone between moves is taken once, without a graph.
        assert report.num_all_ops == len(plan.ops) <= report.num_ops + 1
        assert cuda.main_waits() == waited, "the host waits for nothing"
        assert len(cuda.allocations) == allocated, "inputs go to memory that is there"
        # All ops but the view launch something.
        assert sum(graph.num_calls for graph in cuda.captured) >= len(plan.ops) - 1
        assert cuda.pools[0].num_reused > 0, "memory passes from graph to graph"
    # Last, as a later run could have written to what an earlier one returned.
    for found, wanted in results:
        assert_equal(found, wanted)
    assert not cuda.captured


def test_what_stays_is_one_graph(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = make_plan(toy.workload, residents=frozenset(toy.weights), machine=MACHINE)
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        executor = executor_on(toy, session, plan)
        for _ in range(3):
            x = inputs()
            assert_equal(executor.run(x), toy.eager(x))
        assert len(cuda.captured) == 1


def test_graphs_are_left_out_where_they_are_not_wanted(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=2, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 0)
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        plain = executor_on(toy, session, plan, graphs=False)
        paranoid = toy.executor(session, plan, paranoid=True)
        for _ in range(3):
            x = inputs()
            assert_equal(plain.run(x), toy.eager(x))
            assert_equal(paranoid.run(x), toy.eager(x))
        assert plain.graph_report is paranoid.graph_report is None
    assert not cuda.pools
    # Nor has the processor any.
    with toy.session(make_plan(toy.workload)) as session:
        assert executor_on(toy, session, make_plan(toy.workload)).graph_report is None


def test_other_shapes_run_op_by_op(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 1)
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        executor = executor_on(toy, session, plan)
        for rows, replays in ((4, 0), (4, 1), (3, 1), (3, 1), (4, 2), (4, 3)):
            x = torch.randn(rows, WIDTH)
            assert_equal(executor.run(x), toy.eager(x))
            assert {graph.num_replays for graph in cuda.captured} == ({replays} - {0})
        transposed = torch.randn(WIDTH, 4).t()
        assert_equal(executor.run(transposed), toy.eager(transposed))
        assert {graph.num_replays for graph in cuda.captured} == {3}


def test_two_executors_take_turns(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 1)
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        both = [executor_on(toy, session, plan) for _ in range(2)]
        for run in range(8):
            x = inputs()
            assert_equal(both[run % 2].run(x), toy.eager(x))
        assert len(cuda.pools) == 2
        assert {graph.num_replays for graph in cuda.captured} == {3}


def test_memory_is_given_back_to_runs_that_need_it(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 1)
    needed = plan.arena_bytes["gpu"] + 8 * 4 * WIDTH * 4
    plan = plan.with_accounts(peak_bytes={"gpu": needed}, budget_bytes={"gpu": needed + 9000})
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        ours = executor_on(toy, session, plan)
        larger = plan.with_accounts(peak_bytes={"gpu": needed + 9000})
        other = executor_on(toy, session, larger, graphs=False)
        for _ in range(2):
            for _ in range(3):
                x = inputs()
                assert_equal(ours.run(x), toy.eager(x))
            assert cuda.captured
            assert_equal(other.run(x), toy.eager(x))
            assert not cuda.captured, "beside them the run could have passed the budget"
        assert cuda.allocated_bytes < needed + (1 << 20)


# ---------------------------------------------------------------- what lies between graphs


def test_steps_between_graphs_read_and_feed_them(tmp_path: Path) -> None:
    def body(w: dict[str, fx.Proxy], x: fx.Proxy) -> Sequence[fx.Proxy]:
        first = call(x, aten.mm.default, x, w["w"])
        # A tuple of new tensors, from an op that is not captured.
        pair = call(x, aten._linalg_eigh.default, call(x, aten.mm.default, first, x))
        values = call(x, operator.getitem, pair, 0)
        last = call(x, aten.add.Tensor, call(x, aten.abs.default, values), w["v"])
        return first, last, call(x, aten.t.default, first)

    x = torch.randn(WIDTH, WIDTH)
    toy, plan = make_toy(tmp_path, body, x)
    api, cuda = fake_cuda()
    results = []
    with session_of(toy, plan, api) as session:
        executor = executor_on(toy, session, plan)
        for _ in range(5):
            x = torch.randn(WIDTH, WIDTH)
            results.append((executor.run(x), toy.eager(x)))
        assert len(cuda.captured) == 2
        assert executor.graph_report is not None
        assert executor.graph_report.num_ops == executor.graph_report.num_all_ops - 1
    for found, wanted in results:
        assert_equal(found, wanted)


def test_masks_are_told_from_indices(tmp_path: Path) -> None:
    def body(w: dict[str, fx.Proxy], x: fx.Proxy, i: fx.Proxy) -> Sequence[fx.Proxy]:
        rows = call(x, aten.index.Tensor, x, [i])
        mask = call(x, aten.gt.Scalar, w["v"], 0.0)
        zero = call(x, aten.sum.default, call(x, aten.zeros_like.default, x))
        kept = call(x, aten.index_put.default, w["v"], [mask], zero)
        return call(x, aten.add.Tensor, rows, kept), rows

    toy, plan = make_toy(tmp_path, body, inputs(), torch.tensor([0, 1]))
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        executor = executor_on(toy, session, plan)
        for run in range(4):
            given = (inputs(), torch.tensor([run % 4, 1]))
            assert_equal(executor.run(*given), toy.eager(*given))
        assert len(cuda.captured) == 2, "the op with the mask lies between them"


def test_an_op_that_writes_to_an_input_keeps_graphs_away(tmp_path: Path) -> None:
    def body(w: dict[str, fx.Proxy], x: fx.Proxy) -> Sequence[fx.Proxy]:
        return (call(x, aten.mm.default, call(x, aten.add_.Tensor, x, 1.0), w["w"]),)

    toy, plan = make_toy(tmp_path, body, inputs())
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        executor = executor_on(toy, session, plan)
        for _ in range(4):
            x = inputs()
            wanted = toy.eager(x.clone())
            assert_equal(executor.run(x), wanted)
        assert executor.graph_report is not None
        assert "writes to" in executor.graph_report.reason
    assert not cuda.captured


# ---------------------------------------------------------------- what goes wrong


class Refusing(FakeRuntime):
    """Captures fail from a certain one on."""

    first_refused = 3
    error: BaseException = RuntimeError(
        "operation not permitted when stream is capturing\nand more"
    )

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802 - torch's name
        graph = super().CUDAGraph()
        self.num_made = getattr(self, "num_made", 0) + 1
        if self.num_made >= self.first_refused:
            end = graph.capture_end

            def fail() -> None:
                end()
                self.captured.remove(graph)
                raise RuntimeError("operation not permitted when stream is capturing\nand more")

            graph.capture_end = fail  # type: ignore[method-assign]
        return graph


def refusing() -> tuple[FakeApi, Refusing]:
    api = FakeApi()
    api.runtime = runtime = Refusing(total_bytes=1 << 30, refuse_pins=False)
    return api, runtime


def test_a_capture_that_fails_is_run_op_by_op_and_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 1)
    api, cuda = refusing()
    with session_of(toy, plan, api) as session, caplog.at_level(logging.WARNING):
        executor = executor_on(toy, session, plan)
        before = cuda.allocated_bytes
        for _ in range(5):
            x = inputs()
            assert_equal(executor.run(x), toy.eager(x))
        assert not cuda.captured
        assert cuda.num_made == 3
        assert cuda.allocated_bytes == before, "memory of what was captured is given back"
        report = executor.graph_report
    assert report is not None
    assert report.num_graphs == 0
    (record,) = caplog.records
    assert "not permitted" in record.message
    assert "and more" not in record.message
    assert report.reason in record.message
    assert any(f"'{op.name}'" in report.reason for op in plan.ops)


def test_an_op_that_waits_unseen_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 1)
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session, caplog.at_level(logging.WARNING):
        executor = executor_on(toy, session, plan)
        steps = list(executor._schedule.steps)
        at = [i for i, step in enumerate(steps) if step.meter is not None][4]
        known = steps[at].function

        def waits(*values: Any) -> Any:
            result = known(*values)
            result.sum().item()
            return result

        _replace_step(executor, at, steps[at]._replace(function=waits))
        for _ in range(4):
            x = inputs()
            assert_equal(executor.run(x), toy.eager(x))
    (record,) = caplog.records
    assert f"in op '{steps[at].trait.name}'" in record.message
    assert not cuda.captured


def _replace_step(executor: Executor, at: int, step: RunStep) -> None:
    steps = list(executor._schedule.steps)
    steps[at] = step
    executor._schedule = dataclasses.replace(executor._schedule, steps=tuple(steps))
    assert executor._graphs is not None
    executor._graphs._plain = executor._schedule


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")], ids=["key", "error"])
@pytest.mark.parametrize("run", [0, 1, 2, 4])
def test_after_a_run_that_was_cut_short_the_next_is_right(
    tmp_path: Path, run: int, error: BaseException
) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu", "nvme"}, 1)
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        executor = executor_on(toy, session, plan)
        steps = list(executor._schedule.steps)
        at = [i for i, step in enumerate(steps) if step.trait.host == graph_rules.MOVE][-2]
        known = steps[at].function
        cut: list[bool] = []

        def once() -> Any:
            if cut and cut.pop():
                raise error
            return known()

        _replace_step(executor, at, steps[at]._replace(function=once))
        for i in range(6):
            x = inputs()
            if i == run:
                cut.append(True)
                with pytest.raises(type(error)):
                    executor.run(x)
            assert_equal(executor.run(x), toy.eager(x))
        assert cuda.captured
        assert min(graph.num_replays for graph in cuda.captured) >= 4


def test_an_interrupt_in_a_capture_ends_it(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 1)
    api, cuda = fake_cuda()
    with session_of(toy, plan, api) as session:
        executor = executor_on(toy, session, plan)
        steps = list(executor._schedule.steps)
        at = [i for i, step in enumerate(steps) if step.meter is not None][4]
        known, calls = steps[at].function, []

        def twice(*values: Any) -> Any:
            calls.append(cuda.capturing)
            if calls == [False, True]:
                raise KeyboardInterrupt
            return known(*values)

        _replace_step(executor, at, steps[at]._replace(function=twice))
        x = inputs()
        assert_equal(executor.run(x), toy.eager(x))
        with pytest.raises(KeyboardInterrupt):
            executor.run(x)
        assert not cuda.capturing
        assert not cuda.captured
        for _ in range(3):
            x = inputs()
            assert_equal(executor.run(x), toy.eager(x))
        assert {graph.num_replays for graph in cuda.captured} == {3}
