"""The plan that options ask for: the fastest one, or the one of the fewest joules."""

from __future__ import annotations

from typing import Protocol

from gascompile.core.config import CompileConfig
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload


class Make(Protocol):
    """Makes the fastest plan of a workload, or that of one strategy alone."""

    def __call__(self, workload: Workload, *, strategy: str | None) -> Plan: ...


def require_model(machine: Machine, config: CompileConfig) -> None:
    """Return if ``machine`` has a model of what is asked for; else raises ``ValueError`` before anything slow."""
    if config.objective == "energy" and machine.energy is None:
        from gascompile.passes.plan.least_energy import no_model

        raise ValueError(no_model(machine))


def planned(
    make: Make, workload: Workload, machine: Machine, config: CompileConfig, *, is_free: bool = True
) -> Plan:
    """Return the plan of ``workload`` for ``config.objective``; ``is_free`` is that of ``least_energy``.

    Raises:
        InfeasiblePlanError: there is none.
        ValueError: nothing says what the machine's work takes in joules.
    """
    if config.objective == "energy" and config.strategy is None:
        from gascompile.passes.plan.least_energy import least_energy

        return least_energy(
            lambda of, strategy: make(of, strategy=strategy), workload, machine, is_free=is_free
        )
    return make(workload, strategy=config.strategy)
