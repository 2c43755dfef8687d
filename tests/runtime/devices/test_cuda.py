"""The CUDA device on a stand-in for CUDA: what it asks for, in which order, and that the host never waits."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile.core.errors import DeviceError
from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Prefetch
from gascompile.passes.graph.insert import insert
from gascompile.runtime.debug.watched import WatchedDevice
from gascompile.runtime.devices import device_for
from gascompile.runtime.devices.cuda import CudaApi, CudaDevice
from gascompile.runtime.devices.probe import DEVICE_MEMORY, PINNED_MEMORY
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.runtime.memory.pinned import pinned_bytes
from gascompile.runtime.protocols import Event
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests.runtime.devices.fake_cuda import FakeApi, fake_cuda
from tests.runtime.devices.machines import accelerator
from tests.runtime.toys import Toy, make_plan, mlp

WIDTH = 32
MACHINE = dataclasses.replace(accelerator(), backend="cuda")


def plan_over(toy: Toy, tiers: set[str], seed: int) -> Plan:
    """Return a plan with a resident weight, the others streamed from ``tiers``."""
    links = tuple(x for x in MACHINE.links if x.target_tier != "gpu" or x.source_tier in tiers)
    machine = dataclasses.replace(MACHINE, links=links)
    return make_plan(
        toy.workload, residents=frozenset(list(toy.weights)[:2]), seed=seed, machine=machine
    )


def assert_equal(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for ours, eager in zip(found, wanted, strict=True):
        assert torch.equal(ours, eager)


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH)


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "tiers", [{"cpu"}, {"nvme"}, {"cpu", "nvme"}], ids=lambda tiers: "+".join(sorted(tiers))
)
@pytest.mark.parametrize("seed", range(4))
def test_the_host_waits_for_nothing_in_the_steady_state(
    tmp_path: Path, tiers: set[str], seed: int
) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, tiers, seed)
    api, cuda = fake_cuda()
    device = WatchedDevice(CudaDevice(api=api))
    with toy.session(plan, device=device) as session:
        executor = Executor(session, insert(toy.program, plan), plan, paranoid=True, measure=False)
        assert cuda.allocations == [plan.arena_bytes["gpu"]]
        assert sum(cuda.pinned.values()) == session.pinned_bytes == pinned_bytes(plan)
        for run in range(6):
            if run == 2:
                waited, pins = cuda.main_waits(), cuda.num_pins
            x = inputs()
            assert_equal(executor.run(x), toy.eager(x))
        assert cuda.main_waits() == waited
        assert cuda.num_pins == pins == 1 + ("cpu" in {t.home for t in plan.tensors.values()})
        # Beside the arena only the inputs took memory.
        assert cuda.allocations[1:] == [x.nbytes] * 6
        links = {step.link for step in plan.steps if isinstance(step, Prefetch)}
        assert len(cuda.streams) == len(links | {session.link})
        copies = {stream.name for stream in cuda.streams}
        assert {whom for who, whom in cuda.orders if who == "compute"} == copies
        assert {whom for who, whom in cuda.orders if who != "compute"} == {"compute"}
    assert device.races.num_checked > 0
    assert not cuda.pinned
    del executor, session, device, x
    assert cuda.allocated_bytes == fake_cuda()[1].allocated_bytes


@pytest.mark.parametrize("overlap", [True, False])
def test_a_measured_run_waits_once_and_reports_the_devices_own_peak(
    tmp_path: Path, overlap: bool
) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu", "nvme"}, 1)
    api, cuda = fake_cuda()
    with toy.session(plan, device=CudaDevice(api=api)) as session:
        executor = toy.executor(session, plan, overlap=overlap)
        for run in range(4):
            before = cuda.main_waits()
            x = inputs()
            assert_equal(executor.run(x), toy.eager(x))
            report = executor.last_run
            assert report is not None
            if run:
                assert cuda.main_waits() - before == 1
                assert {k: v for k, v in report.link_bytes.items() if v} == {
                    k: v for k, v in plan.link_bytes.items() if v
                }
            assert report.peak_bytes["gpu"] == plan.arena_bytes["gpu"] + x.nbytes
            assert report.peak_bytes["cpu"] == pinned_bytes(plan)
            assert report.stall_s >= 0


class Deaf(CudaDevice):
    """A device whose compute waits for nothing."""

    def hold(self, event: Event) -> None:
        pass


def test_the_stand_in_is_late(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 0)
    with toy.session(plan, device=Deaf(api=fake_cuda()[0])) as session:
        x = inputs()
        outputs = toy.executor(session, plan).run(x)
    assert any(output.isnan().any() for output in outputs)


def test_a_run_on_another_stream_comes_after_the_one_before(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=2, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 0)
    api, cuda = fake_cuda()
    other = cuda._named("compute")
    with toy.session(plan, device=CudaDevice(api=api)) as session:
        executor = toy.executor(session, plan)
        x = inputs()
        executor.run(x)
        given = other.given
        with cuda.stream(other):
            assert_equal(executor.run(x), toy.eager(x))
        assert other.given > given


# ---------------------------------------------------------------- what is refused


def test_an_arena_that_does_not_fit_names_who_holds_the_memory() -> None:
    device = CudaDevice(api=fake_cuda(total_bytes=4 << 20)[0])
    with pytest.raises(DeviceError, match=r"needs 8.00 MiB .* 3.00 MiB are free") as error:
        device.arena(8 << 20)
    assert error.value.cause == DEVICE_MEMORY


class Fragmented(FakeApi):
    """A device that has enough memory, in pieces."""

    def empty(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("in pieces")


def test_an_arena_that_is_free_in_pieces_only_is_refused_with_torchs_words() -> None:
    with pytest.raises(DeviceError, match=r"no room for an arena of 1.00 KiB.*in pieces"):
        CudaDevice(api=Fragmented()).arena(1 << 10)


def test_memory_that_cannot_be_pinned_names_the_limit() -> None:
    device = CudaDevice(api=fake_cuda(refuse_pins=True)[0])
    with pytest.raises(
        DeviceError, match=r"refused to pin 4.00 KiB.*CUDA error 2.*ulimit"
    ) as error:
        device.pinned(4096)
    assert error.value.cause == PINNED_MEMORY
    assert device.pinned(0).size_bytes == 0


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=2, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 0)
    small = fake_cuda(total_bytes=plan.arena_bytes["gpu"] + (1 << 20) + 8)[0]
    with pytest.raises(DeviceError, match="no room for 1 states"):
        Session.for_plan(
            plan,
            sources=toy.sources,
            states={"n": torch.zeros(16)},
            device=CudaDevice(api=small),
        )


def test_the_host_budget_holds_what_is_pinned(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=4, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 0)
    homes = [t.size_bytes for t in plan.tensors.values() if t.home == "cpu"]
    needed = plan.machine.io.staging_bytes + sum(reserve_bytes(size) for size in homes)
    assert pinned_bytes(plan) == needed
    for limit, fits in ((needed, True), (needed - 1, False)):
        tight = plan.with_accounts(budget_bytes={**plan.budget_bytes, "cpu": limit})
        api, cuda = fake_cuda()
        if fits:
            with toy.session(tight, device=CudaDevice(api=api)) as session:
                toy.executor(session, tight)
                assert sum(cuda.pinned.values()) == limit
            continue
        with pytest.raises(DeviceError, match=rf"Budget\(cpu={needed}\)"):
            toy.session(tight, device=CudaDevice(api=api))
        assert not cuda.num_pins


# ---------------------------------------------------------------- the parts


def test_views_of_the_arena_stay_within_it() -> None:
    arena = CudaDevice(api=fake_cuda()[0]).arena(64)
    view = arena.view(16, "float32", (2, 4))
    view.fill_(1.0)
    assert arena.contains(view)
    assert not arena.contains(torch.zeros(2))
    assert (arena.bytes(16, 48).view(torch.float32) == 1.0).all()
    arena.fill(16, 20, 0)
    assert view[0, 0] == 0
    for offset in (-4, 36):
        with pytest.raises(ValueError, match="32 bytes at address"):
            arena.view(offset, "float32", (2, 4))
    arena.close()
    with pytest.raises(AssertionError, match="after it was closed"):
        arena.bytes(0, 1)


def test_short_times_between_instants_are_none() -> None:
    device = CudaDevice(api=fake_cuda()[0])
    start, stop = device.clock(), device.clock()
    start.time_s, stop.time_s = 1.0, 1.0 + 10e-6
    assert device.elapsed_s(start, stop) == 0.0
    stop.time_s = 1.5
    assert device.elapsed_s(start, stop) == pytest.approx(0.5)


def test_copies_of_threads_keep_their_events_apart() -> None:
    api, _ = fake_cuda()
    device = CudaDevice(api=api)
    arena, host = device.arena(4096 * 8), device.pinned(4096 * 8)
    wanted = torch.arange(4096 * 8).to(torch.uint8)
    host.bytes(0, 4096 * 8).copy_(wanted)
    events: dict[int, Event] = {}

    def copy(i: int) -> None:
        part = slice(i * 4096, (i + 1) * 4096)
        target, source = arena.bytes(part.start, part.stop), host.bytes(part.start, part.stop)
        events[i] = device.stream("cpu->gpu").copy(target, source, name="w", after=device.mark())

    threads = [threading.Thread(target=copy, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(api.runtime.streams) == 1
    for i in range(8):
        events[i].wait()
        assert events[i].reached
        assert torch.equal(arena.bytes(i * 4096, (i + 1) * 4096), wanted[i * 4096 : (i + 1) * 4096])
    device.close()


class FirstGpu:
    """As much of ``torch.cuda`` as it takes to make a device."""

    def current_device(self) -> int:
        return 3


def test_the_real_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be run of them where there is no GPU: their tensors are the host's."""
    monkeypatch.setattr(CudaApi, "runtime", FirstGpu())
    assert device_for(MACHINE).torch_device == torch.device("cuda", 3)
    assert CudaDevice(1).torch_device == torch.device("cuda", 1)
    api, host = CudaApi(), torch.device("cpu")
    target, source = api.empty(8, host), torch.arange(8, dtype=torch.uint8)
    api.copy(target, source)
    assert torch.equal(target, source)
    assert torch.equal(api.place(source, host), source)
    kept = api.keep(source.view(2, 4).t(), host)
    assert kept.is_contiguous()
    assert kept.data_ptr() != source.data_ptr()
    assert torch.equal(kept, source.view(2, 4).t())


def test_an_op_without_memory_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = mlp(tmp_path, layers=2, width=WIDTH)
    plan = plan_over(toy, {"cpu"}, 0)
    with toy.session(plan, device=CudaDevice(api=fake_cuda()[0])) as session:
        executor = toy.executor(session, plan)

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("no block")

        steps = list(executor._schedule.steps)
        at = next(i for i, step in enumerate(steps) if step.meter is not None)
        broken = [*steps[:at], steps[at]._replace(function=fail), *steps[at + 1 :]]
        with monkeypatch.context() as patch:
            schedule = dataclasses.replace(executor._schedule, steps=tuple(broken))
            patch.setattr(executor, "_schedule", schedule)
            with pytest.raises(DeviceError, match=r"no room for op '.*no block.*smaller budget"):
                executor.run(inputs())
        x = inputs()
        assert_equal(executor.run(x), toy.eager(x))


def test_memory_of_the_host_that_was_taken_ahead_is_given_back() -> None:
    early = EarlyMemory(1 << 16)
    assert CudaDevice(api=fake_cuda()[0]).arena(64, early).size_bytes == 64
    assert early.take(64) is None
