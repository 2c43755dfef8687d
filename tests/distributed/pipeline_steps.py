"""Steps of a stage of a pipeline, as workers of tests open them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gascompile import compile_step
from gascompile.core.errors import GASCompileError
from gascompile.training.pipeline import pipeline
from gascompile.training.step import TrainingStep
from tests.distributed.pipeline_jobs import (
    ROWS,
    Piped,
    batches,
    loss_fn,
)
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def mesh_of(shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def begins_of(piped: Piped, size: int) -> list[float]:
    """Return where stages begin; each further one has a half of what the last of fewer has."""
    begins = list(piped.begins)
    while len(begins) < size:
        begins.append((1 + begins[-1]) / 2)
    return begins[:size]


def opened(
    piped: Piped, model: nn.Module, folder: Path, loss: Any = loss_fn, **options: Any
) -> TrainingStep:
    pipeline.forced = None
    if piped.begins:
        pipeline.forced = lambda size, stages: (
            [int(size * begin) for begin in begins_of(piped, stages)],
            piped.num_batches,
        )
    mesh = options.pop("mesh", ({"pp": SIZE}))
    return compile_step(
        model,
        loss,
        piped.optimizer(model),
        piped.budget,
        machine=MACHINE,
        cache_dir=folder / f"cache-{RANK}",
        time_limit_s=PLANNING_S,
        mesh=mesh_of(mesh) if SIZE > 1 else None,
        **{**piped.options, **options},
    )


def own_batches(number: int, count: int) -> list[list[torch.Tensor]]:
    """Return the rows of each batch that one of ``count`` has."""
    rows = slice(number * ROWS // count, (number + 1) * ROWS // count)
    return [[tensor[rows].clone() for tensor in batch] for batch in batches()]


def raised(function: Callable[[], object]) -> str:
    try:
        function()
    except (GASCompileError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def written(model: nn.Module, folder: Path) -> Path:
    """Return where this rank has a model's weights."""
    path = folder / str(RANK) / "weights.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_model(model, str(path))
    return path
