"""One rank that runs a model whose weights stream from its drive, in step with the others of its host."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.anonymous import anonymous_bytes

RANK = int(os.environ["RANK"])
_SECTOR_BYTES = 512


def main() -> None:
    """Call the model as ``spec.json`` says; write what calls took and read."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    found = measured(spec, Path(spec["folders"][RANK]))
    (Path(sys.argv[2]) / f"{RANK}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def measured(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return seconds of each call, bytes read from the drive and by this process, and what memory it holds."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    import gascompile

    # A configuration tells where it was read from, and ranks are to have the same model.
    config = AutoConfig.from_pretrained(spec["folders"][0])
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config).eval()
    random = torch.Generator().manual_seed(RANK)
    ids = torch.randint(0, 1000, (1, spec["tokens"]), generator=random)
    before_bytes = anonymous_bytes()
    compiled = gascompile.compile(
        model,
        spec["budget"],
        kwargs_of(ids),
        checkpoint=folder,
        machine=spec["machine"],
        cache_dir=Path(os.environ["CACHE"]),
        fuse="off",
        time_limit_s=5.0,
    )
    seconds = []
    for number in range(spec["calls"] + 1):
        if number == 1:
            drive_bytes, own_bytes = read_of_drive(folder), read_here()
            first_s = time.perf_counter()
        begin_s = time.perf_counter()
        logits = compiled(**kwargs_of(ids)).logits
        seconds.append(time.perf_counter() - begin_s)
    found = {
        "seconds": seconds[1:],
        # By the host's clock, which all ranks see.
        "from_to_s": [first_s, time.perf_counter()],
        "drive_bytes": (read_of_drive(folder) - drive_bytes) / spec["calls"],
        "own_bytes": (read_here() - own_bytes) / spec["calls"],
        "shared_pss_bytes": shared_pss_bytes(),
        "anonymous_bytes": anonymous_bytes() - before_bytes,
        "answer": float(logits.double().abs().sum()),
    }
    if dist.is_initialized():
        # What one gives back sooner would be counted whole by those that still have it.
        dist.barrier()
    compiled.close()
    return found


def kwargs_of(ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a call."""
    return {"input_ids": ids, "use_cache": False}


def read_of_drive(folder: Path) -> int:
    """Return the bytes that the drive of ``folder`` has read so far, for all processes."""
    number = os.stat(folder).st_dev
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    return int(path.read_text().split()[2]) * _SECTOR_BYTES


def read_here() -> int:
    """Return the bytes that this process has had read from drives so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def shared_pss_bytes() -> int:
    """Return this process's share of the memory that it has mapped together with others."""
    total, is_shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            # Of files on drives nothing counts: libraries are mapped privately.
            is_shared = "s" in fields[1]
        elif is_shared and fields[0] == "Pss:":
            total += int(fields[1]) << 10
    return total


if __name__ == "__main__":
    main()
