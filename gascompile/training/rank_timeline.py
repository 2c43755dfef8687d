"""The timelines of one step on all ranks, in one trace file: a process for each rank, by rank 0's clock."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gascompile.core import serial
from gascompile.core.errors import UnsupportedOpError
from gascompile.report.perfetto import perfetto_of_several
from gascompile.training.step import TrainingStep
from gascompile.training.timeline import RecordedStep

RANKS_FILE = "timeline.ranks.perfetto.json"


def save_of_ranks(
    step: TrainingStep, recorded: RecordedStep, folder: str | os.PathLike[str]
) -> Path | None:
    """Write what a recorded step took on all ranks as one file for ui.perfetto.dev; all ranks call it.

    Return:
        its path on rank 0, which writes it, and ``None`` on others.

    Raises:
        RankError: a rank does something else, or has failed.
        StorageError: the folder cannot be written to; the other ranks raise a RankError.
        UnsupportedOpError: this process trains alone; ``RecordedStep.save`` writes its timeline.
    """
    ranks = step.ranks
    if ranks is None:
        raise UnsupportedOpError(
            "a process that trains alone has one timeline: save it by recorded.save(folder)"
        )
    with ranks.together():
        clock = ranks.clock()
        own = perfetto_of_several(
            recorded.plan, {f"rank {ranks.rank}": recorded.measured}, first=ranks.rank + 1
        )
        own["begun_s"], own["error_s"] = recorded.begun_s - clock.ahead_s, clock.error_s
        told = ranks.gathered("the timeline of a step", json.dumps(own).encode())
        path = Path(folder) / RANKS_FILE
        if ranks.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            serial.write_output(path, serial.dumps(merged([json.loads(each) for each in told])))
        ranks.alike("the timeline of a step")
    return path if ranks.rank == 0 else None


def merged(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return trace files of ranks as one, in which time counts from the beginning of the first rank that began."""
    zero_s = min(file["begun_s"] for file in files)
    events = []
    for file in files:
        late = round((file["begun_s"] - zero_s) * 1e6, 3)
        events += [
            {**event, "ts": round(event["ts"] + late, 3)} if "ts" in event else event
            for event in file["traceEvents"]
        ]
    said = [file["otherData"] for file in files]
    seconds = {name: value for each in said for name, value in each["seconds"].items()}
    errors = {name: file["error_s"] for name, file in zip(seconds, files, strict=True)}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": said[0]["model"], "seconds": seconds, "clock_error_s": errors},
    }
