"""On heap: what a plan of a captured model may do with states and activations."""

from __future__ import annotations

import torch

from gascompile.core.machine import Machine
from gascompile.core.program import Program, draws
from gascompile.core.workload import TensorKind
from gascompile.passes.graph.annotate import Annotation
from gascompile.passes.plan.move_anything import OnHeap
from gascompile.runtime.memory.lasting_accounts import LEAST_BYTES, TRANSFER_BYTES
from gascompile.runtime.memory.pinned import HOST


def on_heap(program: Program, annotation: Annotation, machine: Machine) -> OnHeap | None:
    """Return what a plan may do with states and activations; ``None`` where weights alone may move.

    Weights that move in another form, lie otherwise than in rows or are returned take an arena.
    """
    strided = any(
        spec.stride is not None
        for name, spec in program.bound.items()
        if name not in program.states
    )
    workload = annotation.workload
    is_host = machine.compute_tier == HOST
    if program.forms or strided or not (is_host or HOST in machine.tiers):
        return None
    returned = annotation.returned & program.bound.keys()
    if not returned <= program.states:
        return None
    targets = [node.target for node in program.op_nodes()]
    plain = [t for t in targets if isinstance(t, torch._ops.OpOverload)]
    if any(isinstance(t, torch._ops.HigherOrderOperator) for t in targets):
        return None
    changed = {name for op in workload.ops for name in op.writes}
    inputs = {t.name for t in workload.tensors if t.kind is TensorKind.INPUT}
    return OnHeap(
        reserved_bytes=TRANSFER_BYTES if is_host else 0,
        staying=frozenset(
            tensor.name
            for tensor in workload.tensors
            if tensor.kind is TensorKind.STATE
            and (
                tensor.name not in changed
                or tensor.name in returned
                or tensor.size_bytes < LEAST_BYTES
                or program.bound[tensor.name].stride is not None
            )
        ),
        # What draws or changes what the caller has would not do the same again.
        recompute=not any(map(draws, plain)) and not changed & inputs,
        # A device's rows would pass through memory that nobody counts there.
        gathers=is_host,
        # Nor is it known what a device would lose with its compiled kernels and graphs.
        gains=is_host,
    )
