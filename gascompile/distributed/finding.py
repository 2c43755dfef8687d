"""Finding the ranks of a job: from the environment that ``torchrun`` sets, or in a mesh."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gascompile.distributed.opening import open_default_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gascompile.distributed.ranks import Ranks

MESH = ("dp", "pp")
"""Names of the dimensions of pipelines beside each other."""


def find_ranks(mesh: DeviceMesh | None = None) -> Ranks | None:
    """Return this process's place in ``mesh``, or in the job that ``torchrun`` has started; ``None`` if it is alone.

    Raises:
        ValueError: a mesh of more dimensions than one of stages, ``pp``, behind one of rows, ``dp``.
    """
    from gascompile.distributed.ranks import Ranks

    if mesh is None or mesh.mesh_dim_names is None or mesh.mesh_dim_names[-1] != "pp":
        group = find_group(mesh)
        return Ranks(group) if group is not None else None
    if mesh.size() == 1:
        return None
    if mesh.mesh_dim_names != MESH or 1 in mesh.shape:
        parts = [mesh[name] for name in mesh.mesh_dim_names if mesh[name].size() > 1]
        group = find_group(parts[0] if len(parts) == 1 else mesh)
    else:
        members = mesh.mesh.flatten().tolist()
        is_whole = members == list(range(dist.get_world_size()))
        how: dict[str, Any] = {"backend": "gloo", "use_local_synchronization": True}
        group = dist.group.WORLD if is_whole else dist.new_group(members, **how)
    return Ranks(group, mesh["pp"].size()) if group is not None else None


def find_group(mesh: DeviceMesh | None = None) -> dist.ProcessGroup | None:
    """Return the group of ``mesh``, or of the job that ``torchrun`` has started; ``None`` if this process is alone.

    Raises:
        ValueError: a mesh of more than one dimension.
    """
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}; pass one of them: of mesh['dp'] "
                "each rank takes rows of its own, of mesh['pp'] each is a stage of the model"
            )
        return mesh.get_group() if mesh.size() > 1 else None
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        if not started or int(os.environ["WORLD_SIZE"]) < 2:
            return None
        open_default_group()
    if dist.get_world_size() < 2:
        return None
    assert dist.group.WORLD is not None, "it is initialised"
    return dist.group.WORLD
