"""Compiled for: the model that a process gets, alone, as one of the ranks of a host, or as one stage of a pipeline.

A process that is alone imports nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from gascompile.api.compiled import CompiledModel
from gascompile.api.started import started
from gascompile.distributed.host import find_local_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gascompile.api.compile import Job


def compiled_for(
    mesh: DeviceMesh | Literal[False] | None,
    make: Callable[..., Job],
    budget: Any,
    machine: Any,
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
) -> CompiledModel:
    """Return the compiled model of this process.

    Args:
        mesh: as ``gascompile.compile`` takes it.
        make: returns the job of a budget and a machine.
        budget: as ``gascompile.compile`` takes it.
        machine: as ``gascompile.compile`` takes it.
        given: arguments to plan for now.
    """
    if mesh is not None and mesh is not False and mesh.mesh_dim_names == ("pp",):
        from gascompile.api.piped import compiled_in_stages

        return compiled_in_stages(mesh, make, budget, machine, given)
    ranks = find_local_ranks(mesh) if mesh is not False else None
    if ranks is None:
        return started(make(budget=budget, machine=machine), given)
    from gascompile.api.ranked import compiled_over

    return compiled_over(ranks, make, budget, machine, given)
