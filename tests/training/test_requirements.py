"""Models, optimizers and batches that a planned step cannot follow are refused by name, others taken as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from gascompile import compile_step
from gascompile.core.errors import CaptureError, GASCompileError, UnsupportedOpError
from gascompile.training.step import TrainingStep
from tests.training.runs import MACHINE

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Named:
    x: torch.Tensor
    scale: float = 0.5


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch.x if hasattr(batch, "x") else batch["x"] if isinstance(batch, dict) else batch
    value: torch.Tensor = model(x).pow(2).mean()
    return value


def made(
    model: nn.Module, folder: Path, batch: Any = BATCH, loss_fn: Any = square, **options: Any
) -> TrainingStep:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return compile_step(
        model, loss_fn, optimizer, "64MiB", batch, machine=MACHINE, cache_dir=folder, **options
    )


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_what_exchanges_gradients_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)))
    for model in (inside[0], inside, nn.DataParallel(nn.Linear(8, 8))):
        with pytest.raises(UnsupportedOpError, match=r"train in one process.*model\.module"):
            made(model, tmp_path)
    sharded = nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (1,))
    torch.distributed.fsdp.fully_shard(sharded, mesh=mesh)
    with pytest.raises(UnsupportedOpError, match="train in one process"):
        made(sharded, tmp_path)
    with made(nn.Linear(8, 8), tmp_path) as step:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        with pytest.raises(UnsupportedOpError, match="one of 4 processes"):
            step(BATCH)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: nn.Module = torch.jit.trace(nn.Linear(8, 8), BATCH)
    return found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(8), "call the model once"),
        (scripted, "ScriptModule"),
        (lambda: with_buffer(torch.eye(8).to_sparse()), "train it dense"),
        (lambda: nn.Linear(8, 8).double(), "keep masters in float32"),
    ],
)
def test_models_that_cannot_be_trained_as_they_are(
    make: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    with pytest.raises(GASCompileError, match=message):
        made(make(), tmp_path)


def with_buffer(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(8, 8)
    model.register_buffer("other", value)
    return model


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.ones((4, 8), dtype=np.float32)}, "torch.from_numpy"),
        ((BATCH, object()), "dataclasses"),
    ],
)
def test_batches_of_which_it_is_not_known_what_they_hold(
    batch: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=message):
        made(nn.Linear(8, 8), tmp_path, batch)


def test_a_batch_that_wants_a_gradient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOpError, match="detach"):
        made(nn.Linear(8, 8), tmp_path, BATCH.clone().requires_grad_())


def test_dataclasses_and_encodings_are_batches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for batch in (Named(BATCH), transformers.BatchEncoding({"x": BATCH})):
        model = nn.Linear(8, 8)
        expected = square(model, batch).detach()
        with made(model, tmp_path, batch, square) as step:
            assert torch.equal(step(batch), expected)


def test_compiled_parts_are_traced_as_they_are_written(tmp_path: Path) -> None:
    whole: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    expected = square(whole, BATCH).detach()
    whole[2] = torch.compile(whole[2], backend="eager")
    with made(whole, tmp_path, loss_fn=torch.compile(square, backend="eager")) as step:
        assert torch.equal(step(BATCH), expected)
