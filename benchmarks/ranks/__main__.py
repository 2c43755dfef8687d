"""Training and inference by several processes of one machine, held to cores, memory, drives and networks of their own.

    python -m benchmarks.ranks [PART...] [--toy] [--kills N] [-o FILE]

* ``equal``: losses beside one process's on the same batches, for five models on two and four ranks;
* ``unequal``: one of two ranks has half a core, or loses it: rows that follow beside DDP and FSDP2;
* ``gpt2``: GPT-2 small on two ranks of 0.6 GiB each, beside FSDP2 with offload and one rank's plan;
* ``predicted``: predicted beside measured seconds of a step; more ranks or memory never slower in prediction;
* ``kills``: ranks that are killed, a full drive and a dead one; checkpoints of other numbers of ranks;
* ``drives``: inference that streams weights from each rank's own drive, or from one that all share;
* ``pipeline``: stages beside ranks with rows of their own, over a slow network and where memory is short.

Every part writes what was asked for beside what was measured to ``benchmarks/results/ranks-<machine>-<date>.json``,
where parts that were run apart come together. Root is needed for the limits.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from benchmarks.environment import headed, result_path, write_result
from benchmarks.ranks.limits import missing
from benchmarks.ranks.parts import Result, Setting, merged, tables

PARTS = ("equal", "unequal", "gpt2", "predicted", "kills", "drives", "pipeline")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and write their results; 1 where something asked for was not met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--toy", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--kills", type=int, default=50, help="ranks to kill (default: 50)")
    parser.add_argument("--machine", help="name or file, for equal; this machine, if not given")
    parser.add_argument("--scratch", type=Path, help="folder for files; temporary")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part is named {', '.join(sorted(unknown))}")
    # Who ends this ends the ranks, too, and gives drives and networks back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False, markup=False, width=150)
    if why := missing():
        console.print(f"Limits cannot be held here: {why}")
        return 1
    result: Result = {**headed("ranks"), "parts": {}}
    path = options.output or result_path("ranks")
    with tempfile.TemporaryDirectory(prefix="gascompile-ranks-", dir=options.scratch) as name:
        machine = {"machine": options.machine} if options.machine else {}
        setting = Setting(folder=Path(name), toy=options.toy, kills=options.kills, options=machine)
        for part in options.parts or PARTS:
            found = measured(part, setting)
            for table in tables(part, found):
                console.print(table)
            for note in found["notes"]:
                console.print(note)
            result["parts"][part] = found
            if not options.toy or options.output:
                write_result(merged(path, result), path)
                console.print(f"{part}: {found['seconds']:.0f} s; written: {path}")
    checks = [check["met"] for part in result["parts"].values() for check in part["checks"]]
    console.print(f"{sum(checks)} of {len(checks)} figures as asked")
    return int(not all(checks))


def measured(part: str, setting: Setting) -> Result:
    """Run a part; where it fails, its result says why."""
    load, begin_s = os.getloadavg()[0], time.monotonic()
    module = importlib.import_module(f"benchmarks.ranks.{part}")
    try:
        found = module.run(setting).result()
    except (OSError, RuntimeError) as error:
        check = {"what": "the part ran", "asked": "holds", "measured": False, "met": False}
        found = {"checks": [check], "rows": [], "notes": [f"{part}: {error}"]}
    seconds = time.monotonic() - begin_s
    return {"load": load, "toy": setting.toy, "seconds": seconds, **found}


if __name__ == "__main__":
    sys.exit(main())
