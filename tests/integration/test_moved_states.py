"""States that do not fit beside what computes: a cache of keys and values that leaves and comes back each token."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from benchmarks.cached_decoder import CachedDecoder, build_decoder, cache_bytes
from gascompile.api import moved_states
from gascompile.core.budget import Budget
from gascompile.core.errors import ForkedError, OpenStepError, StorageError, UnsupportedOpError
from gascompile.core.sizes import MIB
from gascompile.core.steps import Offload, Reload
from gascompile.core.workload import TensorKind
from tests.allocator import peak_growth_bytes
from tests.stand_in_kernels import stand_in

BUDGET = 8 * MIB
PLANNING_S = 3.0
"""Nothing here asks how fast a plan is."""


ON_BOTH = pytest.mark.parametrize("machine", [None, "emulated"])


def token(number: int = 3) -> torch.Tensor:
    return torch.tensor([[number]])


def at(*positions: int) -> torch.Tensor:
    return torch.tensor(positions)


def compiled_of(
    model: nn.Module,
    cache: Path,
    machine: str | None = None,
    budget: int | Budget | None = None,
    *,
    plans_later: bool = False,
    **options: Any,
) -> gascompile.CompiledModel:
    own = Budget(cpu=BUDGET) if machine is None else Budget(gpu=BUDGET)
    return gascompile.compile(
        model,
        budget or own,
        None if plans_later else (token(), at(0)),
        machine=machine,
        cache_dir=cache,
        time_limit_s=PLANNING_S,
        **{"fuse": "off", **options},  # so that bits can be compared
    )


@pytest.fixture
def decoder() -> CachedDecoder:
    """Return a decoder with a cache of four times the budget."""
    found = build_decoder(num_layers=16, width=64, num_heads=4, num_tokens=4096)
    assert cache_bytes(found) == 4 * BUDGET
    return found


@pytest.fixture(scope="module")
def planned(measured_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache in which a plan stays from test to test."""
    folder = tmp_path_factory.mktemp("planned")
    shutil.copytree(measured_cache / "machine", folder / "machine")
    return folder


@pytest.fixture
def cache(planned: Path) -> Path:
    return planned


@pytest.fixture
def eager(decoder: CachedDecoder) -> CachedDecoder:
    return copy.deepcopy(decoder)


def cache_of(model: nn.Module, layer: int, kind: str) -> torch.Tensor:
    return model.get_buffer(f"layers.{layer}.{kind}")


def check(compiled: Any, eager: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = eager(*inputs)
    found = compiled(*inputs)
    assert torch.equal(found, wanted)
    result: torch.Tensor = found
    return result


def assert_states(found: nn.Module, eager: nn.Module) -> None:
    values, wanted = dict(found.state_dict()), dict(eager.state_dict())
    torch.testing.assert_close(values, wanted, rtol=0, atol=0)


@ON_BOTH
def test_a_cache_of_four_times_its_tier_is_eagers(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path, machine: str | None
) -> None:
    fused = partial(compiled_of, fuse="auto", fuse_runs=math.inf)
    with stand_in() as kernels, fused(decoder, cache, machine) as compiled:
        assert kernels.written
        plan = compiled.plan
        states = {t.name for t in plan.workload.tensors if t.kind is TensorKind.STATE}
        stored = [s for s in plan.steps if isinstance(s, Offload) and s.tensor in states]
        loaded = [s for s in plan.steps if isinstance(s, Reload) and s.tensor in states]
        assert loaded
        # Of each only the pages of one row are written out.
        assert sum(s.size_bytes for s in stored) * 50 < sum(s.size_bytes for s in loaded)
        next_token = token()
        for position in range(6):
            next_token = check(compiled, eager, next_token, at(position)).argmax(-1)
            report = compiled.last_run
            assert report is not None
            tier = plan.machine.compute_tier
            assert report.peak_bytes[tier] <= plan.peak_bytes[tier] <= BUDGET
            assert report.peak_bytes["cpu"] <= plan.peak_bytes["cpu"]
            for link, moved in plan.link_bytes.items():
                found = report.link_bytes.get(link, 0)
                # What is written out begins and ends with pages, of which the plan takes the most there may be.
                assert found <= moved if link.startswith(tier) else found == moved
        assert peak_growth_bytes(lambda: compiled(next_token, at(6))) <= BUDGET
        eager(next_token, at(6))
        assert_states(decoder, eager)
    assert_states(decoder, eager)
    assert all(type(value) is torch.Tensor for value in decoder.buffers())


@ON_BOTH
def test_states_are_read_and_written_while_they_are_away(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path, machine: str | None
) -> None:
    with compiled_of(decoder, cache, machine) as compiled, torch.no_grad():
        check(compiled, eager, token(), at(0))
        for number in range(8):
            for kind in ("keys", "values"):
                found, own = cache_of(decoder, number, kind), cache_of(eager, number, kind)
                assert torch.equal(found, own)
                assert torch.equal(found[0, 1, :2], own[0, 1, :2])
        states = compiled.states
        assert torch.equal(states["layers.3.keys"], cache_of(eager, 3, "keys"))
        for model in (decoder, eager):
            cache_of(model, 0, "keys").zero_()
            cache_of(model, 5, "values")[0, 0, 0] = 2.0
        check(compiled, eager, token(5), at(1))
        decoder.load_state_dict(eager.state_dict())
        check(compiled, eager, token(6), at(2))
        # Rows that were written before, and several tokens that stay where they are.
        check(compiled, eager, token(7), at(0))
        assert_states(decoder, eager)
        assert torch.equal(decoder(token(8), at(3)), eager(token(8), at(3)))
        check(compiled, eager, token(9), at(4))


@ON_BOTH
def test_signatures_share_the_states(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path, machine: str | None
) -> None:
    with gascompile.compile(decoder, BUDGET, cache_dir=cache, time_limit_s=PLANNING_S) as compiled:
        check(compiled, eager, torch.tensor([[1, 2, 3]]), at(0, 1, 2))
        check(compiled, eager, token(), at(3))
        check(compiled, eager, torch.tensor([[4, 5, 6]]), at(4, 5, 6))
        check(compiled, eager, token(), at(7))
        assert_states(decoder, eager)


def test_an_error_of_an_op_leaves_eagers_states(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path
) -> None:
    with compiled_of(decoder, cache) as compiled:
        check(compiled, eager, token(), at(0))
        for inputs in ((token(), at(4096)), (token(100_000), at(1))):
            for model in (compiled, eager):
                with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
                    model(*inputs)
        assert_states(decoder, eager)
        check(compiled, eager, token(), at(1))
        assert_states(decoder, eager)


@ON_BOTH
def test_an_interrupt_between_two_ops_leaves_eagers_states(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path, machine: str | None
) -> None:
    with compiled_of(decoder, cache, machine) as compiled:
        check(compiled, eager, token(), at(0))
        executor: Any = compiled._gascompile.executor
        schedule = executor._schedule
        steps = schedule.steps
        for number in range(5, len(steps), max(1, len(steps) // 7)):

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            broken = steps[number]._replace(function=interrupted)
            changed = (*steps[:number], broken, *steps[number + 1 :])
            executor._schedule = dataclasses.replace(schedule, steps=changed)
            with pytest.raises(KeyboardInterrupt):
                compiled(token(number % 500), at(number % 7))
            executor._schedule = schedule
            # The rows of that token are half written, as eager would leave them: the whole call writes them again.
            check(compiled, eager, token(number % 500), at(number % 7))
        assert_states(decoder, eager)


@pytest.mark.parametrize("has_pages", [True, False])
def test_a_drive_that_fails_is_an_error_and_loses_nothing(
    decoder: CachedDecoder,
    eager: CachedDecoder,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_pages: bool,
) -> None:
    if not has_pages:
        monkeypatch.setattr(moved_states, "page_memory", lambda *_: None)
    with compiled_of(decoder, cache) as compiled:
        check(compiled, eager, token(), at(0))
        session: Any = compiled._gascompile.session
        write = session.store.write
        failing: list[Callable[[], bool]] = []

        def fail(name: str, **options: Any) -> Any:
            ticket = write(name, **options)
            if failing and failing[0]():
                ticket.wait()
                return _Failed(ticket)
            return ticket

        monkeypatch.setattr(session.store, "write", fail)

        def calls(model: Any) -> None:
            for position in range(1, 4):
                model(token(), at(position))

        third = iter((False, False, True))
        failing.append(lambda: next(third, False))
        with pytest.raises(StorageError, match="the drive is gone"):
            calls(compiled)
        failing.clear()
        with torch.no_grad():
            calls(eager)
        calls(compiled)
        assert_states(decoder, eager)


class _Failed:
    """A ticket of a transfer that has failed."""

    event = None
    done, failed = True, True

    def __init__(self, ticket: Any) -> None:
        self.begun_s, self.done_s = ticket.begun_s, ticket.done_s

    def wait(self) -> None:
        raise StorageError("moving failed: the drive is gone")


def test_calls_and_readers_take_turns(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path
) -> None:
    errors: list[BaseException] = []
    with compiled_of(decoder, cache) as compiled:

        def call(number: int) -> None:
            compiled(token(), at(number))

        def read(_: int) -> None:
            assert cache_of(decoder, 4, "keys")[0, 0].isfinite().all()

        def work(use: Callable[[int], None]) -> None:
            try:
                for number in range(5):
                    use(number)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work, args=(use,)) for use in (call, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        with torch.no_grad():
            for position in range(5):
                eager(token(), at(position))
        assert_states(decoder, eager)


def test_a_child_of_a_fork_is_refused_what_its_parent_has(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path
) -> None:
    with compiled_of(decoder, cache) as compiled:
        check(compiled, eager, token(), at(0))
        taken = next(buffer for buffer in decoder.buffers() if "_cover" in vars(buffer))
        child = os.fork()
        if not child:
            code = 1
            try:
                refused = 0
                for use in (lambda: compiled(token(), at(1)), taken.sum, taken.zero_):
                    try:
                        use()
                    except ForkedError:
                        refused += 1
                code = 0 if refused == 3 else 10 + refused
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        check(compiled, eager, token(), at(1))
        assert_states(decoder, eager)


@ON_BOTH
def test_bundles_have_the_states_of_now(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path, tmp_path: Path, machine: str | None
) -> None:
    with compiled_of(decoder, cache, machine) as compiled:
        check(compiled, eager, token(), at(0))
        compiled.save(tmp_path / "bundle")
        with gascompile.load(tmp_path / "bundle") as loaded:
            other = copy.deepcopy(eager)
            for position in (1, 2):
                check(loaded, other, token(5), at(position))
            assert torch.equal(loaded.states["layers.0.keys"], cache_of(other, 0, "keys"))
            loaded.save(tmp_path / "second")
        check(compiled, eager, token(), at(1))
    with gascompile.load(tmp_path / "second") as loaded:
        check(loaded, other, token(5), at(3))


def test_a_second_process_needs_no_plan(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_of(decoder, cache).close()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the plan is in the cache")

    monkeypatch.setattr("gascompile.passes.plan.make_plan.make_plan", refuse)
    with compiled_of(decoder, cache) as compiled:
        check(compiled, eager, token(), at(0))


@ON_BOTH
def test_states_of_a_dropped_model_are_given_back(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path, machine: str | None
) -> None:
    compiled = compiled_of(decoder, cache, machine)
    check(compiled, eager, token(), at(0))
    del compiled
    gc.collect()
    assert all(type(value) is torch.Tensor for value in decoder.buffers())
    assert_states(decoder, eager)


def test_a_view_that_others_hold_is_refused(decoder: CachedDecoder, cache: Path) -> None:
    view = cache_of(decoder, 2, "keys")[0, 0]
    with pytest.raises(UnsupportedOpError, match=r"layers\.2\.keys"):
        compiled_of(decoder, cache)
    assert torch.equal(view, cache_of(decoder, 2, "keys")[0, 0])


def test_one_compiled_model_at_a_time_has_the_states(
    decoder: CachedDecoder, eager: CachedDecoder, cache: Path
) -> None:
    with compiled_of(decoder, cache) as first:
        check(first, eager, token(), at(0))
        with pytest.raises(OpenStepError, match="a compiled model"):
            compiled_of(decoder, cache)
        check(first, eager, token(), at(1))
    with compiled_of(decoder, cache) as second:
        check(second, eager, token(), at(2))


def test_what_fits_stays(decoder: CachedDecoder, eager: CachedDecoder, cache: Path) -> None:
    with compiled_of(decoder, cache, budget=64 * MIB) as compiled:
        assert not any(isinstance(step, Offload) for step in compiled.plan.steps)
        compiled(token(), at(0))
        # In place, as eager changes it.
        assert all(type(value) is torch.Tensor for value in decoder.buffers())
        assert cache_of(decoder, 0, "keys")[0, 0, 0].any()
