"""Trains with a checkpoint after every step, from the last one there is: what the crash tests kill."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from gascompile import CheckpointError
from tests.training.runs import adamw, batches, compiled, freeze, new_model


def main(folder: Path, num_steps: int, *, behind: bool) -> None:
    """Write each loss to ``folder/losses`` after its step, before the checkpoint.

    Args:
        folder: of the run.
        num_steps: after which it ends.
        behind: whether two checkpoints are kept, and made whole behind the next step.
    """
    torch.set_num_threads(1)
    model = new_model().train()
    freeze(model)
    with compiled(model, adamw(model), folder) as step:
        torch.manual_seed(5)
        if (folder / "checkpoints").is_dir():
            try:
                step.load(folder / "checkpoints")
            except CheckpointError as error:
                if "there is no checkpoint" not in str(error):
                    raise
        print("ready", flush=True)
        log = os.open(folder / "losses", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for batch in batches(num_steps)[step.num_steps :]:
            loss = float(step(batch))
            os.write(log, (json.dumps([step.num_steps, loss]) + "\n").encode())
            step.save(folder / "checkpoints", keep=1 + behind, blocking=not behind)
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), behind=sys.argv[3] == "behind")
