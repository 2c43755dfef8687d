"""Ops on both processors when something goes wrong, and plans that are refused."""

from __future__ import annotations

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import gascompile
from gascompile.core.errors import PlanMismatchError, PlanVerificationError, UnsupportedOpError
from gascompile.core.steps import Offload, Reload
from gascompile.core.waiting import own_threads
from gascompile.passes.graph.insert import insert
from gascompile.passes.verify.walk import verify
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests.integration.site_models import (
    ROWS,
    WIDTH,
    Block,
    Towers,
    compiled,
    eager,
    machine,
    with_site,
)


@pytest.mark.parametrize("side", ["steps", "elsewhere"])
def test_an_error_on_either_processor_ends_both_and_the_next_run_is_right(
    side: str, towers: Towers, cache: Path
) -> None:
    def failing(*_values: Any) -> None:
        raise RuntimeError("the processor is on fire")

    with compiled(towers, cache, 1 << 17, machine()) as both:
        weights, x = both.weights, torch.randn(ROWS, WIDTH)
        wanted = eager(towers, x)
        with Session.for_plan(both.plan, sources=weights.sources, stamps=weights.stamps) as session:
            executor: Any = Executor(session, both.graph_module, both.plan)
            whole = executor._schedule
            steps = getattr(whole, side)
            for number in range(len(steps)):
                broken = (
                    *steps[:number],
                    steps[number]._replace(function=failing),
                    *steps[number + 1 :],
                )
                executor._schedule = dataclasses.replace(whole, **{side: broken})
                with pytest.raises(RuntimeError, match="on fire") as error:
                    executor.run(x)
                assert any("while running op" in note for note in error.value.__notes__)
                assert not own_threads("gascompile-site")
            executor._schedule = whole
            assert torch.equal(executor.run(x)[0], wanted[0])


def test_interrupts_leave_the_model_usable(towers: Towers, cache: Path) -> None:
    interrupted = 0
    with compiled(towers, cache, 1 << 17, machine()) as both:
        x = torch.randn(ROWS, WIDTH)
        wanted = eager(towers, x)
        for delay_s in (0.001, 0.0015, 0.002, 0.003, 0.005, 0.008):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                for _ in range(100):
                    both(x)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            assert torch.equal(both(x)[0], wanted[0])
    assert interrupted == 6
    assert not own_threads("gascompile-site")


def test_threads_take_turns(towers: Towers, cache: Path) -> None:
    wrong: list[int] = []
    with compiled(towers, cache, 1 << 17, machine()) as both:

        def work(seed: int) -> None:
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
            wanted = eager(towers, x)
            wrong.append(sum(not torch.equal(both(x)[0], wanted[0]) for _ in range(5)))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == [0, 0, 0]


def test_a_bundle_runs_on_both_and_a_wrong_one_is_refused(
    towers: Towers, cache: Path, tmp_path: Path
) -> None:
    x = torch.randn(ROWS, WIDTH)
    with compiled(towers, cache, 1 << 17, machine()) as both:
        both.save(tmp_path / "bundle")
        plan, program = both.plan, both.program
    with gascompile.load(tmp_path / "bundle", any_machine=True) as loaded:
        assert {op.site for op in loaded.plan.ops} == {"gpu", "cpu"}
        for found, wanted in zip(loaded(x), eager(towers, x), strict=True):
            assert torch.equal(found, wanted)
    verify(plan)
    simulated = gascompile.simulate(plan)
    assert simulated.seconds == pytest.approx(plan.certificate.predicted_s)
    with pytest.raises(PlanVerificationError):
        verify(with_site(plan, {op.name: "cpu" for op in plan.ops}))
    # The first op elsewhere never sees what it needs.
    unsent = [s for s in plan.steps if not isinstance(s, (Offload, Reload))]
    with pytest.raises(PlanVerificationError):
        verify(dataclasses.replace(plan, steps=tuple(unsent)))
    with pytest.raises(PlanMismatchError, match="where no step has sent it"):
        insert(program, dataclasses.replace(plan, steps=tuple(unsent)))


def test_an_op_elsewhere_that_may_not_be_there_is_refused(cache: Path) -> None:
    model = Block().eval()
    with compiled(model, cache, 1 << 19, machine(), "one") as one:
        name = next(op.name for op in one.plan.ops if op.name.startswith("bernoulli"))
        with pytest.raises(PlanMismatchError, match="may run on 'gpu' alone"):
            insert(one.program, with_site(one.plan, {name: "cpu"}))
        with (
            Session.for_plan(
                one.plan, sources=one.weights.sources, states=dict(one.states)
            ) as session,
            pytest.raises(UnsupportedOpError, match="runs ops on cpu and gpu"),
        ):
            Executor(session, one.graph_module, with_site(one.plan, {name: "nvme"}))


def test_a_machine_that_does_not_know_the_hosts_speed_has_one_site(
    towers: Towers, cache: Path
) -> None:
    where = dataclasses.replace(machine(), rates=machine().rates[:1], memory=machine().memory[:1])
    with compiled(towers, cache, 1 << 17, where) as one:
        assert {op.site for op in one.plan.ops} == {"gpu"}
    with pytest.raises(ValueError, match="sites is one of one, all"):
        compiled(towers, cache, 1 << 17, where, "both")
