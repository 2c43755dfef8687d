"""Makes a compiled model of a job: with a plan for given inputs, or with none before its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gascompile.api.compiled import CompiledModel
from gascompile.api.runner import Runner
from gascompile.api.unit import Unit
from gascompile.capture.calls import call_names, normalize_call
from gascompile.core.collection import no_collection
from gascompile.runtime.memory.early_memory import EarlyMemory
from gascompile.weights.resolve import reserved_bytes

if TYPE_CHECKING:
    from gascompile.api.compile import Job


def started(
    job: Job,
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    of: Callable[..., Runner] = Runner,
) -> CompiledModel:
    """Return the compiled model of ``job``.

    Args:
        job: what is planned.
        given: the arguments of a call to plan for now, by place and by name.
        of: what runs the plans.
    """
    units = [_unit(job, *given)] if given is not None else []
    # Graphs and plans are many objects that stay: passes over them would take as long as making them.
    with no_collection():
        return CompiledModel.of(
            of(
                positional=call_names(job.model),
                units=units,
                planning=job,
                cache_dir=job.config.cache_dir,
                on_exceed=job.config.on_exceed,
            )
        )


def _unit(job: Job, given: tuple[Any, ...], named: Mapping[str, Any]) -> Unit:
    args, kwargs = normalize_call(job.model, given, named)
    if job.shares_memory:
        return job.prepare(args, kwargs)
    early = EarlyMemory(min(reserved_bytes(job.model), job.limit_bytes))
    with ExitStack() as stack:
        stack.callback(early.discard)
        with no_collection():
            looked_up = job.look_up(args, kwargs)
            unit = looked_up.unit
        unit = unit or job.plan_anew(looked_up, args, kwargs)
        stack.pop_all()
    unit.early = early
    return unit
