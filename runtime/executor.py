"""Runs a plan: calls the ops in order while the session's engine reads ahead, and measures what it did.

The loop interprets prepared steps instead of calling the graph's code: values go when their last reader
has run, live bytes are counted as they are really allocated, and an error names its op.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import fx

from gascompile.errors import PlanMismatchError
from gascompile.ir import Plan
from gascompile.reports import RunReport
from gascompile.runtime.meter import LiveBytes, process_peak_bytes
from gascompile.runtime.mover import PlanMover
from gascompile.runtime.session import Session, resident_addresses
from gascompile.runtime.steps import Schedule, compile_steps


class Executor:
    """One plan on a session. Calls from several threads run one after the other."""

    def __init__(
        self,
        session: Session,
        graph_module: fx.GraphModule,
        plan: Plan,
        *,
        overlap: bool = True,
        poison: bool = False,
    ) -> None:
        """Prepare ``graph_module``, the program with the moves of ``plan`` inserted.

        Args:
            session: memory and files; other executors may share it.
            graph_module: what ``passes.insert`` made of the program and ``plan``.
            plan: a verified plan.
            overlap: ``False`` reads each weight where it is waited for, and never ahead; results are
                bit-identical, which makes it the twin to debug with.
            poison: spoil the bytes of a visit when it ends, so that a wrong schedule shows in results.

        Raises:
            PlanMismatchError: session, graph and plan do not belong together.
        """
        _check_session(session, plan)
        self._session = session
        self._plan = plan
        self.mover = PlanMover(session, plan, overlap=overlap, poison=poison)
        self._schedule: Schedule = compile_steps(graph_module, plan, session, self.mover)
        self.last_run: RunReport | None = None

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the program on its flat inputs and return its flat outputs.

        Outputs are the caller's own: none of them aliases a weight or a state. An output that is an
        input is returned as it is. After an error, an interrupt included, the next run starts afresh.

        Raises:
            StorageError: a weight cannot be read, a file has changed, the session is closed.
            PlanMismatchError: the number of inputs is wrong.
        """
        schedule = self._schedule
        if len(inputs) != len(schedule.inputs):
            raise PlanMismatchError(
                f"the program takes {len(schedule.inputs)} inputs, not {len(inputs)}"
            )
        with self._session.run(self) as warm, torch.no_grad():
            start_s = time.perf_counter()
            self.mover.begin(warm=warm)
            values = list(schedule.slots)
            for (_, slot), value in zip(schedule.inputs, inputs, strict=True):
                values[slot] = value
            live = self.mover.live = LiveBytes(schedule.num_metered)
            self._interpret(values, live)
            outputs = tuple(self.mover.own(values[slot]) for slot in schedule.outputs)
            live_bytes = live.peak_bytes + self.mover.copied_bytes
            self.last_run = self._report(time.perf_counter() - start_s, live_bytes)
        return outputs

    def _interpret(self, values: list[Any], live: LiveBytes) -> None:
        op = 0
        record = live.record
        try:
            for function, gather, result, meter, frees, op in self._schedule.steps:  # noqa: B007
                values[result] = function(*gather(values))
                if meter is not None:
                    record(meter, values[result])
                for slot in frees:
                    values[slot] = None
        except BaseException as error:
            name = self._plan.ops[op].name if op < len(self._plan.ops) else "output"
            error.add_note(f"while running op {op} '{name}' of '{self._plan.workload.name}'")
            raise

    def _report(self, time_s: float, live_bytes: int) -> RunReport:
        plan, session, mover = self._plan, self._session, self.mover
        limit_s = plan.certificate.limit_s
        tier = plan.machine.compute_tier
        return RunReport(
            seconds=time_s,
            peak_bytes={tier: session.arena.size_bytes + session.state_bytes + live_bytes},
            link_bytes=dict(mover.link_bytes),
            stall_s=sum(stall.time_s for stall in mover.stalls),
            # A rate may have been measured a little low: faster than the limit is at the limit.
            share_of_limit=min(limit_s / time_s, 1.0),
            paths={**session.engine.paths, **mover.heap_paths},
            stalls=tuple(mover.stalls),
            process_peak_bytes=process_peak_bytes(),
        )


def _check_session(session: Session, plan: Plan) -> None:
    tier = plan.machine.compute_tier
    needed = plan.arena_bytes.get(tier, 0)
    if needed > session.arena.size_bytes:
        raise PlanMismatchError(
            f"the plan needs an arena of {needed} bytes, the session has {session.arena.size_bytes}; "
            "plan both for the same budget"
        )
    for name, address in resident_addresses(plan).items():
        if session.addresses.get(name) != address:
            raise PlanMismatchError(
                f"the plan keeps '{name}' at address {address}, the session at "
                f"{session.addresses.get(name)}; plan with the session's resident weights"
            )
