"""Opens the job's default group from what ``torchrun`` sets, also where it has started the ranks again.

torchrun keeps one store for all its restarts, and ranks use it without a name of their own for each: in torch 2.13 a
rank may find the address of one that was killed before, and wait for it, or is refused, at every second restart or so.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from gascompile.core.errors import RankError

_PAUSE_S = 0.01  # between looks for ranks, which take seconds to start
_LIMIT = timedelta(minutes=30)
"""Ranks that do not come; torch's own time for it."""


def open_default_group() -> None:
    """Open the default group over Gloo, and NCCL where there are GPUs.

    Raises:
        RankError: a rank does not come.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    store, rank, size = next(rendezvous("env://"))
    own = unused(store, rank, size)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


def unused(store: Store, rank: int, size: int, limit: timedelta = _LIMIT) -> Store:
    """Return a part of ``store`` that is these ranks' own, whatever ranks before them have left in it.

    Rank 0 lists who it sees until each has found itself in the list, under whose name they then go on: names that
    others have left are no process's that is still here.

    Raises:
        RankError: a rank does not come within ``limit``.
    """
    until_s = time.monotonic() + limit.total_seconds()
    own = uuid.uuid4().hex
    here = c10d.PrefixStore("gascompile/opening", store)
    here.set(f"here/{rank}", own)
    while time.monotonic() < until_s:
        if rank == 0:
            others = [f"here/{other}" for other in range(1, size)]
            if not others or here.check(others):
                here.set("all", " ".join([own, *(here.get(name).decode() for name in others)]))
                if not others or here.check([f"{own}/{other}" for other in range(1, size)]):
                    return c10d.PrefixStore(f"gascompile/{own}", store)
        elif here.check(["all"]):
            listed = here.get("all").decode().split()
            if len(listed) == size and listed[rank] == own:
                here.set(f"{listed[0]}/{rank}", "")
                return c10d.PrefixStore(f"gascompile/{listed[0]}", store)
        time.sleep(_PAUSE_S)
    raise RankError(f"this is rank {rank} of {size}, and not all others have come to open the job")
