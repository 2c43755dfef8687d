"""The emulated accelerator: plans over three tiers equal eager in any timing, and no missing order stays unseen."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from gascompile.core.errors import DeviceError, GASCompileError, RaceError, UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.sizes import KIB, reserve_bytes
from gascompile.core.steps import Offload, Prefetch, Wait
from gascompile.passes.graph.insert import insert
from gascompile.runtime.debug.races import COMPUTE, Races, host_thread
from gascompile.runtime.debug.watched import WatchedDevice, WatchedEvent, WatchedStream
from gascompile.runtime.devices import device_for
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.protocols import Booking, CopyStream, Event
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests.runtime.devices.machines import accelerator
from tests.runtime.toys import Toy, make_plan, mlp

WIDTH = 32
FAST = accelerator(up=1e11, down=1e11, nvme=1e11, latency_s=1e-6)


def only_from(tier: str, machine: Machine = FAST) -> Machine:
    """Return the machine with a single link into the accelerator."""
    links = (x for x in machine.links if x.target_tier != "gpu" or x.source_tier == tier)
    return dataclasses.replace(machine, links=tuple(links))


def watched(seed: int) -> WatchedDevice:
    disorder = Disorder(seed=seed, longest_delay_s=1e-4)
    return WatchedDevice(EmulatedDevice(FAST, disorder=disorder, late=True))


def assert_equal(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for ours, eager in zip(found, wanted, strict=True):
        assert torch.equal(ours, eager)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_weights_of_either_home_arrive(tmp_path: Path, tier: str, overlap: bool, seed: int) -> None:
    toy = mlp(tmp_path, layers=4)
    residents = frozenset(name for i, name in enumerate(toy.weights) if i % 4 < seed)
    plan = make_plan(toy.workload, residents=residents, seed=seed, machine=only_from(tier))
    assert {t.home for t in plan.tensors.values()} == {"gpu", tier}
    with toy.session(plan) as session:
        executor = toy.executor(session, plan, overlap=overlap)
        for run in range(3):
            x = torch.randn(4, 96)
            assert_equal(executor.run(x), toy.eager(x))
            report = executor.last_run
            assert report is not None
            wanted = dict(plan.link_bytes)
            if run == 0:
                loaded = sum(toy.sources[name].size_bytes for name in residents)
                wanted[session.link] += loaded
            found = {link: count for link, count in report.link_bytes.items() if count}
            assert found == {link: count for link, count in wanted.items() if count}
        streamed = [t.size_bytes for t in plan.tensors.values() if t.home == "cpu"]
        staging_bytes = plan.machine.io.staging_bytes
        held_bytes = staging_bytes + sum(reserve_bytes(size) for size in streamed)
        assert report is not None
        assert report.peak_bytes["cpu"] == held_bytes


@pytest.mark.parametrize("seed", range(20))
def test_fifty_disturbed_runs_of_each_of_twenty_plans(tmp_path: Path, seed: int) -> None:
    toy = mlp(tmp_path, layers=2, width=WIDTH)
    residents = frozenset(name for i, name in enumerate(toy.weights) if (i + seed) % 5 == 0)
    plan = make_plan(toy.workload, residents=residents, seed=seed, machine=FAST)
    generator = torch.Generator().manual_seed(seed)
    device = watched(seed)
    with toy.session(plan, device=device) as session:
        # Every other plan never lets the host wait at a run's end: runs follow each other on streams alone.
        module = insert(toy.program, plan)
        executor = Executor(session, module, plan, paranoid=True, measure=seed % 2 == 0)
        for _ in range(50):
            x = torch.randn(4, WIDTH, generator=generator)
            assert_equal(executor.run(x), toy.eager(x))
    streamed = sum(isinstance(step, Prefetch) for step in plan.steps)
    assert device.races.num_checked > 50 * streamed


def test_executors_take_turns_on_one_device(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=3, width=WIDTH)
    plans = [make_plan(toy.workload, seed=seed, machine=FAST) for seed in (1, 2)]
    largest = max(plans, key=lambda plan: plan.arena_bytes["gpu"])
    with toy.session(largest, device=watched(3)) as session:
        executors = [toy.executor(session, plan) for plan in plans]
        for i in (0, 0, 1, 0, 1, 1, 0):
            x = torch.randn(4, WIDTH)
            assert_equal(executors[i].run(x), toy.eager(x))


# ---------------------------------------------------------------- what is missing is seen


class Forgetful(WatchedDevice):
    """A device that leaves out one hold of compute, or the start condition of one copy.

    It knows by itself whether that left anything unordered: another event may order the same.
    """

    def __init__(self, *, hold: int | None = None, after: int | None = None) -> None:
        super().__init__(EmulatedDevice(FAST, late=True))
        self._forget_hold, self._forget_after = hold, after
        self.num_holds = 0
        self.num_copies = 0
        self.harmful = False
        self.used: list[tuple[int, int, int]] = []
        self._races = LoggedRaces(self.used)

    def hold(self, event: Event) -> None:
        assert isinstance(event, WatchedEvent)
        self.num_holds += 1
        if self.num_holds - 1 != self._forget_hold:
            super().hold(event)
            return
        known = self.races.mark(COMPUTE)
        self.harmful = any(known.get(x, 0) < count for x, count in event.clock.items())

    def stream(self, link: str, *, ahead: bool = False) -> WatchedStream:
        assert not ahead, "no model here gathers rows"
        if link not in self._streams:
            self._streams[link] = ForgetfulStream(link, self._inner.stream(link), self._races, self)
        return self._streams[link]

    def forgets(self, link: str, target: torch.Tensor) -> bool:
        self.num_copies += 1
        if self.num_copies - 1 != self._forget_after:
            return False
        marks = self.races.mark(link), self.races.mark(host_thread())
        known = max(mark.get(COMPUTE, 0) for mark in marks)
        low, high = target.data_ptr(), target.data_ptr() + target.nbytes
        self.harmful = any(
            start < high and low < stop and count > known for start, stop, count in self.used
        )
        return True


class LoggedRaces(Races):
    """Keeps all accesses of compute: first byte, end, count."""

    def __init__(self, used: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self._used = used

    def access(
        self, stream: str, tensor: torch.Tensor, *, writes: bool, name: str, what: str
    ) -> None:
        super().access(stream, tensor, writes=writes, name=name, what=what)
        if stream == COMPUTE and tensor.is_contiguous():
            start = tensor.data_ptr()
            self._used.append((start, start + tensor.nbytes, self.mark(COMPUTE).get(COMPUTE, 0)))


class ForgetfulStream(WatchedStream):
    """A stream of a ``Forgetful`` device."""

    def __init__(self, link: str, inner: CopyStream, races: Races, device: Forgetful) -> None:
        super().__init__(link, inner, races)
        self._device = device
        self._name = link

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        name: str,
        after: Event | None = None,
        booking: Booking | None = None,
    ) -> Event:
        assert after is not None or name.endswith("bias"), "only residents come unconditionally"
        if after is not None and self._device.forgets(self._name, target):
            after = None
        return super().copy(target, source, name=name, after=after, booking=booking)


def run_twice(toy: Toy, plan: Plan, device: Forgetful) -> None:
    """Run without the host's wait at the end of a run, which would order what events should."""
    module = insert(toy.program, plan)
    with toy.session(plan, device=device) as session:
        executor = Executor(session, module, plan, paranoid=True, measure=False)
        for _ in range(2):
            x = torch.randn(4, WIDTH)
            assert_equal(executor.run(x), toy.eager(x))
        # What was asked for ahead, for a third run: its errors are those of whoever waits for it.
        for ticket in executor.mover._staged.values():
            ticket.wait()


PLANS = [("cpu", 0), ("nvme", 1), ("both", 2), ("both", 3)]


def small_plan(folder: Path, tier: str, seed: int) -> tuple[Toy, Plan]:
    """Return a plan in which each op reads one streamed weight, read by one thread: runs are alike."""
    toy = mlp(folder, layers=4, width=WIDTH)
    machine = FAST if tier == "both" else only_from(tier)
    io = dataclasses.replace(machine.io, num_threads=1)
    residents = frozenset(name for name in toy.weights if name.endswith("bias"))
    return toy, make_plan(toy.workload, residents=residents, seed=seed, io=io, machine=machine)


def is_race(toy: Toy, plan: Plan, device: Forgetful) -> bool:
    try:
        run_twice(toy, plan, device)
    except RaceError:
        return True
    return False


@pytest.mark.parametrize(("tier", "seed"), PLANS)
def test_every_hold_that_orders_something_is_missed(tmp_path: Path, tier: str, seed: int) -> None:
    toy, plan = small_plan(tmp_path, tier, seed)
    whole = Forgetful()
    run_twice(toy, plan, whole)
    waits = sum(isinstance(step, Wait) for step in plan.steps)
    assert whole.num_holds >= 2 * waits
    caught = 0
    for number in range(whole.num_holds):
        device = Forgetful(hold=number)
        found = is_race(toy, plan, device)
        assert found == device.harmful
        caught += found
    assert caught >= waits


@pytest.mark.parametrize(("tier", "seed"), PLANS)
def test_every_release_that_a_copy_must_heed_is_missed(
    tmp_path: Path, tier: str, seed: int
) -> None:
    toy, plan = small_plan(tmp_path, tier, seed)
    whole = Forgetful()
    run_twice(toy, plan, whole)
    fetches = sum(isinstance(step, Prefetch) for step in plan.steps)
    assert whole.num_copies >= 2 * fetches
    caught = 0
    for number in range(whole.num_copies):
        device = Forgetful(after=number)
        found = is_race(toy, plan, device)
        assert found == device.harmful
        caught += found
    assert caught >= fetches


@pytest.mark.parametrize(("tier", "seed"), PLANS)
def test_every_wait_taken_out_of_a_plan_is_caught(tmp_path: Path, tier: str, seed: int) -> None:
    toy, plan = small_plan(tmp_path, tier, seed)
    waits = [i for i, step in enumerate(plan.steps) if isinstance(step, Wait)]
    assert len(waits) >= 5
    for i in waits:
        steps = plan.steps[:i] + plan.steps[i + 1 :]
        with pytest.raises(GASCompileError):
            run_twice(toy, dataclasses.replace(plan, steps=steps), Forgetful())


def test_a_race_names_op_tensor_and_address(tmp_path: Path) -> None:
    toy, plan = small_plan(tmp_path, "cpu", 0)
    first = next(step for step in plan.steps if isinstance(step, Wait))
    with pytest.raises(RaceError) as error:
        run_twice(toy, plan, Forgetful(hold=0))
    assert error.value.tensor == first.tensor
    assert f"op '{plan.ops[first.op].name}'" in str(error.value)
    assert f"at address {error.value.address} of the arena" in str(error.value)


# ---------------------------------------------------------------- the device alone


def test_an_arena_past_the_accelerator_is_refused() -> None:
    device = device_for(accelerator(gpu_bytes=64 * KIB))
    assert device.arena(64 * KIB).size_bytes == 64 * KIB
    with pytest.raises(DeviceError, match="has 65536 bytes, the arena takes 65537"):
        device.arena(64 * KIB + 1)


def test_a_link_that_the_machine_has_not_is_refused() -> None:
    with pytest.raises(DeviceError, match="no link 'tape->gpu'"):
        device_for(FAST).stream("tape->gpu")


def test_late_bytes_are_spoiled_until_their_event() -> None:
    device = EmulatedDevice(FAST, late=True)
    arena, host = device.arena(64), device.pinned(64)
    host.fill(0, 64, 7)
    gate = Gate()
    first = device.stream("cpu->gpu").copy(
        arena.bytes(0, 64), host.bytes(0, 64), name="w", after=gate
    )
    reached = [first.reached]
    assert not arena.bytes(0, 64).any()
    gate.opened.set()
    first.wait()
    assert [*reached, first.reached] == [False, True]
    assert (arena.bytes(0, 64) == 7).all()
    device.close()


class Gate:
    """An event that the test reaches."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    @property
    def reached(self) -> bool:
        return self.opened.is_set()

    def wait(self) -> None:
        self.opened.wait()


def test_a_plan_that_moves_activations_of_a_device_is_refused(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=2, width=WIDTH)
    plan = make_plan(toy.workload, machine=FAST)
    away = Offload(op=1, tensor=f"%{plan.ops[0].name}", link="gpu->cpu", size_bytes=512)
    moving = dataclasses.replace(plan, steps=(*plan.steps, away))
    with (
        Session.for_plan(plan, sources=toy.sources, spill_folder=tmp_path) as session,
        pytest.raises(UnsupportedOpError, match=r"activations of the device 'emulated'.*larger"),
    ):
        session.heap_moves(moving)
