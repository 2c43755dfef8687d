"""Training by several processes of one machine: equal to one process, balanced, and killed.

``python -m benchmarks.ranks`` starts ranks with one thread and, where processor cgroups can be made, one core each:

* two ranks of equal rows, whose losses and parameters are compared with eager's of one process on whole batches;
* two ranks of which the second has half a core: DDP and FSDP2 with equal rows, beside planned steps whose rows follow;
* ``torchrun --max-restarts`` over ranks of which a random one is killed at random moments; losses are compared.

It writes ``benchmarks/results/ranks-<machine>-<date>.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.environment import headed, write_result
from examples.small_gpt import SmallGPT, batch_at, next_byte_loss, read_text

_CPU = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 20_000
_LIMIT_S = 600.0
_TOLERANCE = 1e-4
"""Of losses: sums over ranks are rounded in another order."""


class Core:
    """A processor cgroup of a share of one core; nothing where none can be made."""

    def __init__(self, share: float) -> None:
        self.path: Path | None = _CPU / f"gascompile-{uuid.uuid4().hex[:8]}"
        try:
            self.path.mkdir()
            (self.path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self.path / "cpu.cfs_quota_us").write_text(str(int(share * _PERIOD_US)))
        except OSError:
            self.path = None

    def entered(self, command: Sequence[str]) -> list[str]:
        """Return ``command`` as it is run within the share."""
        if self.path is None:
            return list(command)
        return ["/bin/sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *command]

    def remove(self) -> None:
        """Remove the group, once its processes are gone."""
        if self.path is not None:
            with suppress(OSError):
                self.path.rmdir()


def train(
    way: str, folder: Path, options: Sequence[str], shares: Sequence[float]
) -> list[dict[str, Any]]:
    """Return what each rank wrote; one rank per share of a core."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    cores = [Core(share) for share in shares]
    output = folder / uuid.uuid4().hex
    ranks: list[subprocess.Popen[bytes]] = []
    for rank, core in enumerate(cores):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(shares)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "benchmarks.ranks_worker", way, str(output), *options]
        if way == "planned":
            command += ["--cache", str(folder / f"cache-{rank}")]
        log = (folder / f"{way}-{rank}.log").open("wb")
        ranks.append(subprocess.Popen(core.entered(command), env=env, stdout=log, stderr=log))
    try:
        codes = [process.wait(_LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        for core in cores:
            core.remove()
    if any(codes):
        raise SystemExit(f"{way}: exit codes {codes}; see {folder}")
    return [json.loads((output / f"{r}.json").read_text()) for r in range(len(shares))]


def eager_losses(rows: int, steps: int, sizes: dict[str, int]) -> list[float]:
    """Return the losses of one process on whole batches."""
    text, tokens = read_text(None), sizes["tokens"]
    torch.manual_seed(0)
    model = SmallGPT(
        layers=sizes["layers"],
        width=sizes["width"],
        heads=max(sizes["width"] // 64, 1),
        tokens=tokens,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = next_byte_loss(model, batch_at(text, number, batch=rows, tokens=tokens))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def differs(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest difference of two runs' losses."""
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


def equal_ranks(folder: Path, options: Sequence[str], wanted: Sequence[float]) -> dict[str, Any]:
    """Two ranks of one core each."""
    found = train("planned", folder, options, [1.0, 1.0])
    return {
        "max_difference": differs(found[0]["losses"], wanted),
        "same_parameters": found[0]["digest"] == found[1]["digest"],
        "step_s": statistics.median(found[0]["seconds"]),
    }


def unequal_ranks(folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """The second rank has half a core."""
    shares = [1.0, 0.5]
    rows = int(options[options.index("--rows") + 1])
    alone = train("planned", folder, [*options, "--rows", str(rows // 2)], [1.0])[0]
    row_s = statistics.median(alone["seconds"]) / (rows // 2)
    result: dict[str, Any] = {"ideal_s": rows * row_s / sum(shares)}
    for way, more in (("ddp", []), ("fsdp2", []), ("planned", ["--balance"])):
        found = train(way, folder, [*options, *more], shares)[0]
        late = found["seconds"][len(found["seconds"]) // 2 :]
        result[way] = {"step_s": statistics.median(late), "rows": found["rows"][-1]}
        changed = [n for n, rows in enumerate(found["rows"]) if rows != found["rows"][0]]
        result[way]["first_change"] = changed[0] if changed else None
    for way in ("ddp", "fsdp2"):
        result[f"speed_up_over_{way}"] = result[way]["step_s"] / result["planned"]["step_s"]
    result["of_ideal"] = result["ideal_s"] / result["planned"]["step_s"]
    return result


def killed(
    folder: Path, options: Sequence[str], wanted: Sequence[float], kills: int
) -> dict[str, Any]:
    """Kill a random rank at random moments of a job that torchrun starts again."""
    output, kept = folder / "killed", folder / "checkpoints"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={2 * kills}",
        "--master-port=0", "--standalone", "-m", "benchmarks.ranks_worker", "planned", str(output), *options,
        "--cache", str(folder / "cache-killed"), "--checkpoints", str(kept),
    ]  # fmt: skip
    moments = random.Random(0)
    with (folder / "killed.log").open("wb") as log:
        job = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log
        )
        done = 0
        while job.poll() is None and done < kills:
            time.sleep(moments.uniform(4, 12))
            children = subprocess.run(
                ["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=False
            ).stdout.split()
            if children:
                with suppress(ProcessLookupError):
                    os.kill(int(moments.choice(children)), signal.SIGKILL)
                done += 1
        code = job.wait(_LIMIT_S)
    found = json.loads((output / "0.json").read_text()) if not code else {"losses": []}
    return {
        "kills": done,
        "exit_code": code,
        "max_difference": differs(found["losses"], wanted) if not code else None,
    }


def main() -> int:
    """Run all; 0 when losses are right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--kills", type=int, default=10, help="ranks to kill (default: 10)")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    asked = parser.parse_args()
    sizes = (
        {"layers": 2, "width": 64, "tokens": 32}
        if asked.toy
        else {"layers": 4, "width": 256, "tokens": 128}
    )
    rows, steps = (8, 8) if asked.toy else (16, 30)
    options = [str(x) for pair in sizes.items() for x in (f"--{pair[0]}", pair[1])]
    options += ["--rows", str(rows), "--steps", str(steps)]
    wanted = eager_losses(rows, steps, sizes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            **headed("ranks"),
            "load": os.getloadavg()[0],
            "sizes": sizes,
            "rows": rows,
            "steps": steps,
        }
        result["equal"] = equal_ranks(folder, options, wanted)
        result["unequal"] = unequal_ranks(folder, options)
        result["killed"] = killed(folder, options, wanted, asked.kills)
    console = Console(highlight=False)
    console.print_json(
        json.dumps({key: result[key] for key in ("load", "equal", "unequal", "killed")})
    )
    if not asked.toy or asked.output:
        console.print(f"written: {write_result(result, asked.output)}")
    differences = [result["equal"]["max_difference"], result["killed"]["max_difference"]]
    is_right = all(value is not None and value <= _TOLERANCE for value in differences)
    return 0 if is_right and result["equal"]["same_parameters"] else 1


if __name__ == "__main__":
    sys.exit(main())
