"""Ranks that are killed at random moments, a drive that is full and one that is dead; checkpoints by other ranks.

Killed jobs are started again by ``torchrun`` and go on from their last checkpoint: losses have to be, bit for bit,
those of the same ranks left in peace. What takes the time is compared with ranks that do nothing but add a number.
"""

from __future__ import annotations

import random
import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.ranks import jobs
from benchmarks.ranks.drive_faults import dead_drive, full_drive
from benchmarks.ranks.jobs import ONE_CORE
from benchmarks.ranks.parts import Found, Result, Setting, relative
from benchmarks.ranks.restarts import Restarted, killed_often, lines_of, spec_of

TO_NEXT_STEP_S, BEYOND_FLOOR_S = 4.0, 1.0
_STOPS_AFTER = 40
_MORE_KILLS = 4


def task_of(setting: Setting, size: int) -> dict[str, Any]:
    """Return what ranks train here."""
    return {
        "model": "gpt",
        "size": "toy" if setting.toy else "small",
        "rows": [12 // size] * size,
        "budget": "24MiB",
        "options": {"time_limit_s": 2.0},
    }


def run(setting: Setting) -> Found:
    """Kill ranks of two to four, spoil drives, and load by other numbers of ranks."""
    found = Found()
    sizes = (2,) if setting.toy else (2, 3, 4)
    few = 1 if setting.toy else 4
    floor_s = _floor(setting, sizes[0], few)
    found.rows.append({"what": "torchrun and torch alone", "ranks": sizes[0], "median_s": floor_s})
    trains_s = _floor(setting, sizes[0], few, "adamw")
    found.rows.append({"what": "with an AdamW of torch's", "ranks": sizes[0], "median_s": trains_s})
    shares = [setting.kills // len(sizes)] * len(sizes)
    shares[0] += setting.kills - sum(shares)
    for size, kills in zip(sizes, shares, strict=True):
        row = _killed(setting, size, kills)
        found.rows.append(row)
        found.true(
            f"{kills} kills of {size} ranks: losses as if nothing had been", row["same_bits"]
        )
    median_s = next(row["median_s"] for row in found.rows if row["what"] == "killed")
    found.at_most("seconds from a kill to the next step, two ranks", median_s, TO_NEXT_STEP_S)
    beyond_s = None if median_s is None else median_s - floor_s
    found.at_most("seconds beyond torchrun's own restart", beyond_s, BEYOND_FLOOR_S)
    found.notes.append(f"kills: with an AdamW, plain ranks take {trains_s:.2f} s to be back")
    for fault in (full_drive, dead_drive):
        row = fault(setting, {**task_of(setting, 2), "model": "gpt2"})
        found.rows.append(row)
        found.at_most(f"{row['what']}: seconds until all have ended", row["median_s"], 30.0)
        found.true(f"{row['what']}: a typed error on all ranks", row["typed"])
    _saved(found, setting)
    return found


def _floor(setting: Setting, size: int, kills: int, *more: str) -> float:
    """Return the seconds that ``torchrun`` takes from a kill to the next step of ranks that hold nothing."""
    folder = setting.folder / "-".join(("bare", *more))
    module = ["benchmarks.ranks.bare", str(folder), str(folder / "stop"), *more]
    with Restarted(folder, module, size, _MORE_KILLS * (kills + 1)) as job:
        chance, seconds = random.Random(1), []
        job.waits_for(0.0)
        for _ in range(kills):
            before = [line.process for line in job.lines()]
            at = job.kill(chance, 1)
            seconds.append(job.waits_for(at, not_of=before).at - at)
    return statistics.median(seconds)


def _killed(setting: Setting, size: int, kills: int) -> Result:
    folder = setting.folder / f"killed-{size}"
    stop = folder / "stop"
    task = {
        **task_of(setting, size),
        "checkpoints": str(folder / "kept"),
        "every": 5,
        "log": str(folder),
        "stop": str(stop),
        "pause_s": 0.05,
    }
    with Restarted(folder, spec_of(folder, task), size, _MORE_KILLS * (kills + 1)) as job:
        seconds = killed_often(job, kills, random.Random(size))
        steps = max(line.number for line in job.lines()) + _STOPS_AFTER
        stop.with_suffix(".new").write_text(str(steps))
        stop.with_suffix(".new").replace(stop)
        code = job.process.wait(jobs.LIMIT_S)
    still = {**task_of(setting, size), "steps": steps}
    shutil.copytree(folder / "cache", setting.folder / "cache-1.0-1", dirs_exist_ok=True)
    wanted = jobs.run(setting.folder, {"tasks": [still]}, [ONE_CORE] * size).trained()[0][0]
    done = {}
    same = code == 0
    for rank in range(size):
        for line in lines_of(folder / f"steps-{rank}"):
            done[line.number] = float.fromhex(line.loss)
            same = same and done[line.number] == wanted["losses"][line.number]
    taken = [kill["seconds"] for kill in seconds if kill["seconds"] is not None]
    losses = [done.get(number, float("nan")) for number in range(steps)]
    return {
        "what": "killed",
        "ranks": size,
        "kills": len(seconds),
        "two_at_once": sum(kill["at_once"] == 2 for kill in seconds),
        "steps": steps,
        "median_s": statistics.median(taken) if taken else None,
        "slowest_s": max(taken, default=None),
        "difference": relative(losses, wanted["losses"]),
        "same_bits": same,
        "_seconds": seconds,
    }


def _saved(found: Found, setting: Setting) -> None:
    """Save at four ranks, load at fewer and by plain safetensors, and go on."""
    half, last = (2, 4) if setting.toy else (6, 12)
    kept, sizes = setting.folder / "saved", (2, 1) if setting.toy else (4, 3, 2, 1)
    first: Result = {}
    for size in sizes:
        own = setting.folder / f"saved-{size}"
        if first:
            shutil.copytree(kept, own)
        more = {"checkpoints": str(own if first else kept), "steps": last, "first_save": half}
        ended = jobs.run(
            setting.folder, {"tasks": [{**task_of(setting, size), **more}]}, [ONE_CORE] * size
        )
        rank = ended.trained()[0][0]
        first = first or rank
        difference = relative(rank["losses"][-(last - half) :], first["losses"][half:])
        row = {"what": f"saved at {sizes[0]}, loaded", "ranks": size, "difference": difference}
        if rank is not first:
            found.rows.append({**row, "same_bits": None})
            found.true(f"{size} ranks begin where the checkpoint ends", rank["first"] == half)
            found.at_most(f"saved at {sizes[0]}, losses of {size} ranks after it", difference, 1e-6)
    found.true(
        "plain safetensors load it, to the next loss", _plain(setting, kept, first["losses"][half])
    )


def _plain(setting: Setting, kept: Path, wanted: float) -> bool:
    """Return whether PyTorch and safetensors alone come to the loss of the step after the checkpoint."""
    import torch
    from safetensors.torch import load_file

    from benchmarks.ranks.cases import case_of

    task = task_of(setting, 1)
    case = case_of(task["model"], task["size"])
    model, state = case.model(), {}
    folder = max(kept.glob("checkpoint-*"))
    for path in folder.glob("model-*.safetensors"):
        state.update(load_file(path))
    missing, unexpected = model.load_state_dict(state, strict=False)
    number = 2 if setting.toy else 6
    with torch.no_grad():
        loss = float(case.loss(model, case.batch(number, 12)))
    return not missing and not unexpected and abs(loss - wanted) <= 1e-6 * abs(wanted)
