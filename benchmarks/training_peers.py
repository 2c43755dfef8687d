"""Trainers that offload to memory and to drives: DeepSpeed's ZeRO and ColossalAI's Adam.

They ask for other versions of libraries than the rest, so each may live in an environment of its own, whose
interpreter then runs its contenders.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_contenders import LEARNING_RATE, Case, Trainer, loss_fn, trainer_of

WEIGHT_DECAY = 0.01
"""The default of ``torch.optim.AdamW``."""
PACKAGES = {
    "deepspeed-cpu": "deepspeed",
    "deepspeed-nvme": "deepspeed",
    "colossalai-nvme": "colossalai",
}
"""Contenders with the package that each needs."""
_NEEDS_CUDA = {"colossalai"}
"""Its Adam, that for processors too, is compiled with CUDA's tools."""
_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(python: str, packages: Iterable[str]) -> dict[str, str]:
    """Return the packages that the interpreter ``python`` has, with their versions."""
    command = [python, "-c", _VERSIONS, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def missing(contender: str, found: Mapping[str, str]) -> str:
    """Return why a peer cannot run beside the packages that were ``found``; empty if it can."""
    package = PACKAGES[contender]
    if package not in found:
        return f"{package} is not installed; see --peer-python"
    if package in _NEEDS_CUDA and not torch.cuda.is_available():
        return f"{package} compiles its kernels with CUDA, and this machine has no GPU"
    return ""


def _offloaded(case: Case, target: dict[str, Any]) -> Trainer:
    # One process, which needs a place to meet all the same.
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ[name] = value
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29512"
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed: Any = importlib.import_module("deepspeed")
    adam: Any = importlib.import_module("deepspeed.ops.adam")
    optimizer = adam.DeepSpeedCPUAdam(
        case.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adamw_mode=True
    )
    config = {
        "train_micro_batch_size_per_gpu": len(case.first_batch),
        "zero_optimization": {"stage": 3, "offload_optimizer": target},
    }
    engine, *_ = deepspeed.initialize(model=case.model, optimizer=optimizer, config=config)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def close() -> None:
        engine.destroy()
        torch.distributed.destroy_process_group()

    return Trainer(step=step, details=lambda: _files(case.scratch), close=close)


def _files(folder: Path) -> dict[str, Any]:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"offloaded_bytes": sum(sizes)}


def deepspeed_cpu(case: Case) -> Trainer:
    """DeepSpeed, ZeRO-3, the optimizer in memory."""
    return _offloaded(case, {"device": "cpu"})


def deepspeed_nvme(case: Case) -> Trainer:
    """DeepSpeed, ZeRO-3, the optimizer on the drive."""
    return _offloaded(case, {"device": "nvme", "nvme_path": str(case.scratch)})


def colossalai_nvme(case: Case) -> Trainer:
    """ColossalAI's ``HybridAdam`` with all moments on the drive."""
    optimizers: Any = importlib.import_module("colossalai.nn.optimizer")
    optimizer = optimizers.HybridAdam(
        case.model.parameters(),
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adamw_mode=True,
        nvme_offload_fraction=1.0,
        nvme_offload_dir=str(case.scratch),
    )
    plain = trainer_of(lambda batch: loss_fn(case.model, batch), optimizer)
    return Trainer(step=plain.step, details=lambda: _files(case.scratch))


PEERS: dict[str, Callable[[Case], Trainer]] = {
    "deepspeed-cpu": deepspeed_cpu,
    "deepspeed-nvme": deepspeed_nvme,
    "colossalai-nvme": colossalai_nvme,
}
