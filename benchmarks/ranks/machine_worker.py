"""One rank that measures this machine within its limits, as it plans for it: with its cores and its threads."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from gascompile.core.serial import to_json
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks


def main() -> None:
    """Write the machine to the folder that is named second; the file that is named first tells of threads."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    machine = resolve_machine(None, cache_dir=Path(os.environ["CACHE"]), read=read_blocks)
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(to_json(machine)))


if __name__ == "__main__":
    main()
