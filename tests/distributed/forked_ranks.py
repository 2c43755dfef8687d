"""Ranks as children of one process that has imported what all of them need, which takes most of a small job's time.

Run as ``python -m tests.distributed.forked_ranks WORKER SIZE FOLDER ASKED...``; prints the exit codes. They share the
seed of hashes, other than ranks of a real job.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed.device_mesh
from torch._functorch import aot_autograd
from torch.distributed.checkpoint import state_dict_loader

import gascompile
from gascompile.training.pipeline import pipeline

IMPORTED = (
    aot_autograd,
    state_dict_loader,
    pipeline,
    torch.distributed.device_mesh,
    gascompile.compile_step,
)
"""What no rank shall import by itself; nothing of it starts a thread."""


def main() -> None:
    """Fork ranks and wait for them, or be one."""
    worker, size, folder, *asked = sys.argv[1:]
    ranks = []
    for rank in range(int(size)):
        pid = os.fork()
        if pid == 0:
            log = os.open(Path(folder) / f"log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size)
            sys.argv = [worker, folder, *asked]
            runpy.run_module(worker, run_name="__main__", alter_sys=True)
            return
        ranks.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
