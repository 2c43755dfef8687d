"""Runs a plan: calls the ops in order while the session's engine reads ahead, and measures what it did.

The loop interprets prepared steps instead of calling the graph's code: values go when their last reader
has run, memory is counted where it is allocated, and an error names its op.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from gascompile.core.errors import DeviceError, PlanMismatchError, UnsupportedOpError
from gascompile.core.plan import Plan
from gascompile.core.program import draws
from gascompile.core.reports import Energy, GraphReport, RunReport
from gascompile.runtime.devices.energy_counters import energy_counters
from gascompile.runtime.kernels.fused import FusedSegment
from gascompile.runtime.memory.counting import NO_LIMIT, Count, Counter
from gascompile.runtime.run.counted_runs import CountedRuns
from gascompile.runtime.run.fit import require_fit
from gascompile.runtime.run.lane import Lane
from gascompile.runtime.run.meter import LiveBytes, process_peak_bytes
from gascompile.runtime.run.profiled import ProfiledRanges
from gascompile.runtime.run.recording import Recording
from gascompile.runtime.run.schedule import RunSchedule, without_arrivals
from gascompile.runtime.run.session import Session
from gascompile.runtime.run.sharers import make_room
from gascompile.runtime.run.steps import compile_steps
from gascompile.runtime.run.straight import WrittenOut
from gascompile.runtime.transfer.crossings import AbortedError
from gascompile.runtime.transfer.mover import PlanMover

if TYPE_CHECKING:
    from gascompile.runtime.devices.graphs import GraphRuns

_REFUSALS = (
    RuntimeError, TypeError, ValueError, AssertionError, ArithmeticError, LookupError, AttributeError,
)  # fmt: skip
"""What ops raise of their own."""


class Executor:
    """One plan on a session. Calls from several threads run one after the other."""

    def __init__(
        self,
        session: Session,
        graph_module: fx.GraphModule,
        plan: Plan,
        *,
        overlap: bool = True,
        paranoid: bool = False,
        measure: bool = True,
        fused: Sequence[FusedSegment] = (),
        graphs: bool = True,
        counter: Counter | None = None,
        on_exceed: str = "error",
        from_file: bool = False,
        on_host: Collection[str] = (),
        onednn: bool = False,
    ) -> None:
        """Prepare ``graph_module``, the program with the moves of ``plan`` inserted.

        Args:
            session: memory and files; other executors may share it.
            graph_module: what ``passes.insert`` made of the program and ``plan``.
            plan: a verified plan.
            overlap: ``False`` reads each weight where it is waited for, and never ahead; results are
                bit-identical, which makes it the twin to debug with.
            paranoid: spoil the bytes of a staged copy after its last use, so that a wrong schedule shows in results;
                on a watched device every access to the arena is checked, too.
            measure: ``False`` leaves out ``last_run``: a run of a device then returns once everything has
                been given to it, and nothing ever blocks the host but what is not yet read.
            fused: ops that run as compiled kernels.
            graphs: give a device that has graphs the ops between two moves in one call, see ``GraphRuns``; never
                in paranoid runs.
            counter: what counts the memory that runs take; without one, planned workspace is believed. A device
                with memory of its own counts by itself.
            on_exceed: ``"error"`` stops a run before it takes more than the budget; ``"warn"`` says so afterwards.
            on_host: inputs that ops of a device take where they are.
            onednn: large products in ``float32`` may be oneDNN's, which round otherwise.
            from_file: the program is data that nobody has run here: what an op refuses is an ``UnsupportedOpError``.

        Raises:
            PlanMismatchError: session, graph and plan do not belong together.
            UnsupportedOpError: ops of the plan run elsewhere than on the session's device.
        """
        require_fit(session, plan)
        self._session = session
        self._plan = plan
        self._measure, self._from_file, self._on_host = measure, from_file, frozenset(on_host)
        self.mover = PlanMover(session, plan, overlap=overlap, paranoid=paranoid)
        self._metered = self._schedule = compile_steps(
            graph_module, plan, session, self.mover, fused, onednn=onednn
        )
        is_wanted = graphs and not paranoid and not self._schedule.site
        is_wanted = is_wanted and session.device.graphs() is not None
        self._graphs: GraphRuns | None = None
        if is_wanted:
            from gascompile.runtime.devices.graphs import GraphRuns

            self._graphs = GraphRuns(session, plan, self._schedule, on_host)
        self._counted: CountedRuns | None = None
        self._ranges = ProfiledRanges(plan)
        self._energy = energy_counters(session.device.torch_device)
        if counter is not None and session.device.torch_device.type == "cpu":
            is_random = any(draws(node.target) for node in graph_module.graph.nodes)
            self._counted = CountedRuns(counter, session, plan, on_exceed, draws=is_random)
            self._schedule = self._counted.prepared(self._schedule)
        apart = () if session.device.is_host else session.kept.tensors
        self.written = frozenset(n for op in plan.workload.ops for n in op.writes if n in apart)
        """States that a run writes to in the device's memory; ``Session.pull_states`` brings them back."""
        self._has_residents = False
        """Whether all resident weights are there, for which no step waits any more."""
        self.last_run: RunReport | None = None
        self._written_out = WrittenOut()
        self._lane: Lane | None = None
        """Of the latest run, where ops run on several sites."""

    @property
    def computes_on_host(self) -> bool:
        """Whether outputs lie in the host's memory."""
        return self._session.device.is_host

    @property
    def graph_report(self) -> GraphReport | None:
        """How many ops run in how many graphs, or why none does; ``None`` where none was asked for or can be."""
        return self._graphs.report if self._graphs is not None else None

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the program on its flat inputs and return its flat outputs.

        Outputs are the caller's own: none of them aliases a weight or a state. An output that is an
        input is returned as it is. After an error, an interrupt included, the next run starts afresh.

        Raises:
            BudgetExceededError: an op asked for more memory than the budget leaves; it was stopped before.
            StorageError: a weight cannot be read, a file has changed, the session is closed.
            UnsupportedOpError: an op of a program from a file refuses what it is given.
            PlanMismatchError: the number of inputs is wrong.
        """
        if len(inputs) != len(self._schedule.inputs):
            raise PlanMismatchError(
                f"the program takes {len(self._schedule.inputs)} inputs, not {len(inputs)}"
            )
        return self._session.run(self, partial(self._run_here, inputs))

    def run_recorded(self, recording: Recording, *inputs: Any) -> tuple[Any, ...]:
        """Run the program as ``run`` does, and write down when each step of the plan ran.

        Its memory is that of the account that the picture is drawn from, not what the allocator counts.
        """
        schedule = recording.schedule(self._metered, self._plan, self.mover)
        return self._session.run(self, partial(self._run_here, inputs, of=(schedule, recording)))

    def settle(self) -> None:
        """Let no move be under way, so that something else may use the tensors; the next run starts afresh.

        Raises:
            StorageError: one failed.
        """
        self.mover.settle_all()
        self._session.leave(self)

    def close(self) -> None:
        """Give back what this plan alone has taken of its session, which stays open; idempotent."""
        self._session.leave(self)
        self.mover.close()
        if self._session.memory is not None:
            self._session.memory.end()
        if self._graphs is not None:
            self._graphs.give_back()
        # Constants of the steps are tensors that others may want to be gone.
        self._ranges.clear()
        self._schedule = self._metered = replace(self._schedule, steps=(), slots=())
        self._written_out.clear()

    def _lasting(self) -> frozenset[int]:
        """Return the ``id`` of tensors that come and go, on the host, without ever having another storage."""
        store = self._session.store
        if store is None or not self._session.device.is_host:
            return frozenset()
        return frozenset(map(id, store.tensors.values()))

    def _run_here(
        self,
        inputs: tuple[Any, ...],
        warm: bool,
        of: tuple[RunSchedule, Recording] | None = None,
    ) -> tuple[Any, ...]:
        grad, set_grad = torch.is_grad_enabled(), torch._C._set_grad_enabled
        autocast, set_autocast = torch.is_autocast_enabled("cpu"), torch.set_autocast_enabled
        serve = self._session.memory.serve if self._session.memory is not None else bool
        # Not by contexts, whose exits an interrupt may keep from coming to this.
        try:
            try:
                try:
                    set_grad(False)
                    if self._session.store is not None:
                        # The graph has the casts of an autocast in it; updates are to have none.
                        set_autocast("cpu", False)
                    serve(1)
                    return self._run_alone(inputs, warm, of)
                finally:
                    serve(0)
            finally:
                set_autocast("cpu", autocast)
        finally:
            set_grad(grad)

    def _run_alone(
        self, inputs: tuple[Any, ...], warm: bool, of: tuple[RunSchedule, Recording] | None
    ) -> tuple[Any, ...]:
        if of is not None or self._graphs is None:
            make_room(self._session, self._plan)
            if not self._has_residents and self._session.is_loaded:
                self._has_residents, self._schedule = True, without_arrivals(self._schedule)
            schedule, recording = of or (self._schedule, None)
            return self._run(schedule, inputs, warm=warm, recording=recording)
        try:
            outputs = self._run(self._graphs.begin(inputs), inputs, warm=warm)
            self._graphs.done(self.mover.live.peak_bytes)
        except BaseException:
            self._graphs.undone()
            raise
        return outputs

    def _run(
        self,
        schedule: RunSchedule,
        inputs: tuple[Any, ...],
        *,
        warm: bool,
        recording: Recording | None = None,
    ) -> tuple[Any, ...]:
        start_s, before_j = time.perf_counter(), self._energy.read_j() if self._measure else None
        self._session.device.begin()
        self.mover.begin(warm=warm)
        count: Count | None = None
        if recording is not None:
            recording.begin(self.mover, self._session.store)
            outputs, live_bytes = self._compute(schedule, inputs)
            recording.end(self.mover)
        elif self._counted is None:
            outputs, live_bytes = self._compute(schedule, inputs)
        else:
            enforced_bytes = self._counted.enforced_bytes
            with self._counted.run() as count:
                self._counted.begin(count)
                self.mover.counts(count)
                limit = count.limit
                # Not by the context, whose exit an interrupt may keep from coming to it.
                try:
                    limit(enforced_bytes)
                    outputs, _ = self._compute(schedule, inputs)
                finally:
                    limit(NO_LIMIT)
            live_bytes = count.peak_bytes
        if self._measure:
            # Compute alone: what the next run has asked for ahead stays on its way.
            if (end := self._session.device.mark()) is not None:
                end.wait()
            time_s = time.perf_counter() - start_s
            if schedule is self._schedule and self._graphs is None:
                self._written_out.ran(schedule, time_s, self._lasting)
            report = self._report(time_s, live_bytes, is_counted=count is not None)
            if (joules := self._energy.taken_j(before_j, time_s)) is not None:
                report = replace(report, energy=Energy(joules=joules, source=self._energy.source))
            self.last_run = report
        self.mover.end()
        return outputs

    def _compute(
        self, schedule: RunSchedule, inputs: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], int]:
        """Return the outputs, and the bytes that were alive at most as far as meters know."""
        values, graphs = list(schedule.slots), self._graphs
        inputs_bytes = self._place(values, inputs)
        given = {slot: value for (_, slot), value in zip(schedule.inputs, inputs, strict=True)}
        live, schedule = self.mover.live, self._ranges.of(schedule)
        interpret = partial(self._interpret, schedule, values, live)
        if schedule.site:
            memory = self._session.memory
            serve = memory.lane() if memory is not None else bool
            self._lane = Lane(schedule, values, inputs, self.mover.meetings, serve)
            self._lane.beside(interpret, self._session.lanes, self._explained)
        else:
            interpret()
        outputs = tuple(
            given[slot] if slot in given else self.mover.own(values[slot])
            for slot in schedule.outputs
        )
        if graphs is not None:
            outputs = tuple(
                value if slot in given else graphs.own(value)
                for slot, value in zip(schedule.outputs, outputs, strict=True)
            )
            live.peak_bytes = max(live.peak_bytes, graphs.live_bytes)
        return outputs, inputs_bytes + live.peak_bytes + self.mover.copied_bytes

    def _place(self, values: list[Any], inputs: tuple[Any, ...]) -> int:
        """Put the inputs into their slots, on the device; return the bytes that this took there."""
        if self._graphs is not None and (placed := self._graphs.place(values, inputs)) is not None:
            return placed
        taken_bytes = 0
        for (name, slot), value in zip(self._schedule.inputs, inputs, strict=True):
            values[slot] = value
            if isinstance(value, torch.Tensor) and name not in self._on_host:
                values[slot] = there = self._session.device.place(value)
                taken_bytes += there.nbytes if there is not value else 0
        return taken_bytes

    def _interpret(self, schedule: RunSchedule, values: list[Any], live: LiveBytes) -> None:
        straight = self._written_out.of(schedule)
        op = 0
        record = live.record
        try:
            if straight is not None:
                straight.run(values)
                return
            for function, gather, result, meter, frees, op, _, _, _ in schedule.steps:  # noqa: B007
                values[result] = function(*gather(values))
                if meter is not None:
                    record(meter, values[result])
                for slot in frees:
                    values[slot] = None
        except AbortedError:
            raise
        except BaseException as error:
            if straight is not None:
                op = straight.where(error, values)
            explained = self._explained(error, op, values)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, error: BaseException, op: int, values: list[Any]) -> BaseException:
        """Return what to raise for an error of an op."""
        name = self._plan.ops[op].name if op < len(self._plan.ops) else "output"
        if isinstance(error, torch.OutOfMemoryError):
            beyond = self._counted.error(op, values) if self._counted is not None else None
            return beyond or self._session.device.out_of_memory(f"op '{name}'", error)
        if self._from_file and isinstance(error, _REFUSALS):
            return UnsupportedOpError(
                f"op {op} '{name}' of '{self._plan.workload.name}' refuses what it is given ({_line(error)}); call "
                "with other values, or, where the model itself takes these, save the bundle again"
            )
        error.add_note(f"while running op {op} '{name}' of '{self._plan.workload.name}'")
        return error

    def _report(self, time_s: float, live_bytes: int, *, is_counted: bool) -> RunReport:
        plan, session, mover = self._plan, self._session, self.mover
        limit_s = plan.certificate.limit_s
        tier = plan.machine.compute_tier
        stalls = tuple(mover.stalls)
        counted = session.device.peak_bytes()
        by_host = "allocator" if is_counted else "planned workspace"
        planned = session.arena.size_bytes + session.kept.size_bytes + live_bytes
        peak_bytes = {tier: planned if counted is None else counted}
        if not session.device.is_host:
            peak_bytes["cpu"] = session.host_bytes
            if self._lane is not None:
                peak_bytes["cpu"] += self._lane.live.peak_bytes
        capacity_bytes = session.device.capacity_bytes
        if capacity_bytes is not None and peak_bytes[tier] > capacity_bytes:
            raise DeviceError(
                f"the run took {peak_bytes[tier]} bytes of the device '{session.device.name}', which has "
                f"{capacity_bytes}; plan for a smaller budget",
                cause="device memory",
            )
        return RunReport(
            seconds=time_s,
            peak_bytes=peak_bytes,
            link_bytes=dict(mover.link_bytes),
            stall_s=sum(stall.time_s for stall in stalls),
            share_of_limit=limit_s / time_s,
            paths={**session.engine.paths, **mover.heap_paths},
            stalls=stalls,
            process_peak_bytes=process_peak_bytes(),
            site_s=self._site_s(time_s, sum(stall.time_s for stall in stalls)),
            peak_source="device" if counted is not None else by_host,
        )

    def _site_s(self, time_s: float, stall_s: float) -> dict[str, float]:
        if self._lane is None:
            return {}
        own = self._plan.machine.compute_tier
        return {own: time_s - stall_s, self._lane.site: self._lane.busy_s}


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
