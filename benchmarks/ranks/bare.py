"""The least that ``torchrun`` can start again: ranks that add a number and write down when."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def main() -> None:
    """Add until the file that is named second is there; with an optimizer, if ``adamw`` is named third."""
    folder, stop = Path(sys.argv[1]), Path(sys.argv[2])
    # Ranks that were started again would find addresses of dead ones in the store, which outlives them.
    store, rank, size = next(rendezvous("env://"))
    own = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    value, number = torch.ones(1), 0
    if sys.argv[3:] == ["adamw"]:
        # The first optimizer of a process imports torch's compiler.
        torch.optim.AdamW([torch.nn.Parameter(value.clone())])
    while not value.isnan():
        value.fill_(float("nan") if stop.exists() else 1.0)
        dist.all_reduce(value)
        with (folder / f"steps-{dist.get_rank()}").open("a") as file:
            file.write(f"{number} {time.time()} {os.getpid()} {float(value).hex()}\n")
        number += 1
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
