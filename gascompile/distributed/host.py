"""The ranks of a job that run on this host: how they find each other, and the block of memory that they share."""

from __future__ import annotations

import mmap
import os
import socket
from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from gascompile.core.errors import RankError
from gascompile.distributed.finding import find_group
from gascompile.runtime.collectives.local_ranks import (
    LocalRanks,
    Process,
    block_bytes,
    open_handed,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_jobs: dict[tuple[int, ...], int] = {}
"""How often ranks have met, by members: each time under names of its own."""


def find_local_ranks(mesh: DeviceMesh | None = None) -> LocalRanks | None:
    """Return this process among those of its host in ``mesh``, or in the job that ``torchrun`` has started.

    All ranks call it at the same time. ``None`` where this process is alone on its host.

    Raises:
        RankError: the ranks of this host cannot share memory.
        ValueError: a mesh of more than one dimension.
    """
    group = find_group(mesh)
    if group is None:
        return None
    members = tuple(dist.get_process_group_ranks(group))
    number = _jobs[members] = _jobs.get(members, 0) + 1
    prefix = f"gascompile/host/{'-'.join(map(str, members))}/{number}"
    store = c10d.PrefixStore(prefix, c10d._get_default_store())
    own, here = Process.here(), socket.gethostname()
    me = dist.get_rank(group)
    store.set(f"rank/{me}", f"{here} {own.number} {own.began}")
    told = [store.get(f"rank/{r}").decode().rsplit(" ", 2) for r in range(len(members))]
    names = [rank for rank, (host, _, _) in enumerate(told) if host == here]
    if len(names) < 2:
        return None
    processes = [Process(int(told[r][1]), int(told[r][2])) for r in names]
    size_bytes = block_bytes(len(names))
    key, handle = f"block/{names[0]}", -1
    try:
        if me == names[0]:
            handle = os.memfd_create("gascompile-ranks")
            os.ftruncate(handle, size_bytes)
            store.set(key, f"{handle} {os.fstat(handle).st_ino}")
        else:
            descriptor, inode = map(int, store.get(key).decode().split())
            handle = open_handed(processes[0].number, descriptor, inode)
        block = mmap.mmap(handle, size_bytes)
        ranks = LocalRanks(names.index(me), block, processes, names)
        # From here on the first rank may close its descriptor.
        ranks.meet("the block of this host")
    except OSError as error:
        raise RankError(
            f"the ranks of host '{here}' cannot share memory ({error}): run them as one user in one container, or "
            "pass mesh=False, so that each runs for itself",
            rank=me,
        ) from error
    finally:
        if handle >= 0:
            os.close(handle)
    return ranks
