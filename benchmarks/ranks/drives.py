"""Inference whose weights stream from drives of 150 MB/s: one of each rank's own, or one that all ranks share.

Drives are loop devices with file systems of their own, held to their speed by control groups. Every rank answers
rows of its own by all weights, of which one copy is in the host's memory.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
from pathlib import Path
from typing import Any

from benchmarks.llama_checkpoint import write_llama
from benchmarks.ranks import jobs
from benchmarks.ranks.drive_faults import drive
from benchmarks.ranks.limits import Limits
from benchmarks.ranks.parts import Found, Result, Setting
from benchmarks.training_prediction import with_disk
from gascompile.core.serial import dumps, to_json
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

DRIVE_BYTES_PER_S = 150e6
OWN, COPIES, READS = 0.92, 1.1, 1.05
_WORKER = "benchmarks.ranks.drives_worker"
_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
_TOY = {**_SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
_CALLS = 40
"""What the throttle lets through at once, a tenth of a second's bytes, is a quarter of a percent of so many."""
_ROOM_BYTES = 48 << 20
"""Of a file system, beside its files."""


def is_there() -> bool:
    """Return whether compiled models run over the ranks of a host."""
    import gascompile

    return "mesh" in inspect.signature(gascompile.compile).parameters


def run(setting: Setting) -> Found:
    """Measure ranks with own drives, with one that they share, and the memory of weights that fit."""
    found = Found()
    if not is_there():
        found.notes.append("drives: gascompile.compile knows no ranks yet; nothing was measured")
        found.true("compiled models run over ranks", False)
        return found
    with contextlib.ExitStack() as drives:
        made = _Drives(setting, drives)
        alone = made.measure("own", [0])
        found.rows.append(alone)
        for size in made.sizes:
            row = made.measure("own", list(range(size)))
            found.rows.append(row)
            gain = alone["call_s"] / row["call_s"]
            found.at_least(f"times the rate of one drive, {size} ranks", gain, OWN * size)
        for size in made.sizes:
            row = made.measure("shared", [0] * size)
            found.rows.append(row)
            found.at_most(
                f"of one rank's seconds, {size} ranks, one drive",
                row["call_s"] / alone["call_s"],
                1.0,
            )
            found.at_most(
                "of one rank's bytes read", row["drive_bytes"] / alone["drive_bytes"], READS
            )
        row = made.measure("shared", [0] * 2, budget=made.large)
        found.rows.append({**row, "drives": "shared, all in memory"})
        found.at_most(
            "copies of the weights in memory, two ranks",
            row["pss_bytes"] / made.weights_bytes,
            COPIES,
        )
    return found


class _Drives:
    """A checkpoint on as many drives as there may be ranks."""

    def __init__(self, setting: Setting, drives: contextlib.ExitStack) -> None:
        self._folder = setting.folder
        self.sizes = (2,) if setting.toy else (2, 4)
        shape = _TOY if setting.toy else _SHAPE
        origin = write_llama(setting.folder / "llama", shape)
        self.weights_bytes = sum(file.stat().st_size for file in origin.glob("*.safetensors"))
        self.budget = "24MiB" if setting.toy else "128MiB"
        self.large = str(2 * self.weights_bytes)
        self._calls = 2 if setting.toy else _CALLS
        self._copies: list[Path] = []
        self._devices: list[str] = []
        for number in range(max(self.sizes)):
            size_bytes = self.weights_bytes + _ROOM_BYTES
            mounted, device = drives.enter_context(
                drive(setting.folder, f"drive-{number}", size_bytes)
            )
            self._copies.append(Path(shutil.copytree(origin, mounted / "model")))
            self._devices.append(device)
        machine = resolve_machine(None, cache_dir=setting.folder / "machine", read=read_blocks)
        self._machine = setting.folder / "machine.json"
        self._machine.write_text(dumps(to_json(with_disk(machine, DRIVE_BYTES_PER_S))))

    def measure(self, what: str, own: list[int], *, budget: str = "") -> Result:
        """Run one rank per entry of ``own``, the number of its drive, each drive held to its speed."""
        spec: dict[str, Any] = {
            "folders": [str(self._copies[number]) for number in own],
            "budget": budget or self.budget,
            "machine": str(self._machine),
            "tokens": 4,
            "calls": self._calls,
        }
        held = Limits(drives={self._devices[number]: DRIVE_BYTES_PER_S for number in own})
        cores = Limits(cores=min(1.0, 2 / len(own)))
        with jobs.started(
            self._folder, spec, [cores] * len(own), worker=_WORKER, shared=held
        ) as job:
            ranks = job.wait().required()
        slowest = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        # From the first call of any to the last end: the kernel lets a drive's bytes through by tenths of a second, so
        # that calls are short and long by turns, and a rank that comes first to a call waits for the others in it.
        begins, ends = zip(*(rank["from_to_s"] for rank in ranks), strict=True)
        used = {number: rank["drive_bytes"] for number, rank in zip(own, ranks, strict=True)}
        return {
            "drives": what,
            "ranks": len(own),
            "call_s": (max(ends) - min(begins)) / self._calls,
            "drive_bytes": sum(used.values()),
            "own_bytes": sum(rank["own_bytes"] for rank in ranks),
            "pss_bytes": sum(rank["shared_pss_bytes"] for rank in ranks),
            "anonymous_bytes": sum(rank["anonymous_bytes"] for rank in ranks),
            "_seconds": slowest,
        }
