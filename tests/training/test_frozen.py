"""Weights that steps do not change are read where the checkpoint has them, and never copied or mixed with others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

from gascompile import TrainingStep, compile_step
from gascompile.core.errors import StorageError
from tests.training.devices import on_device
from tests.training.runs import BUDGET_BYTES, MACHINE, PLANNING_S, TinyGPT, adamw, batches, loss_fn

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the page memory is compiled once."""
    return tmp_path_factory.mktemp("cache")


def partly_frozen(model: TinyGPT) -> TinyGPT:
    """Leave the blocks' biases, norms and the qkv matrices to be trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("qkv" in name or name.endswith("bias") or "norm" in name)
    return model.train()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    save_model(TinyGPT(blocks=2), str(tmp_path / "model.safetensors"))
    return tmp_path / "model.safetensors"


def outline() -> TinyGPT:
    with torch.device("meta"):
        return partly_frozen(TinyGPT(blocks=2))


def opened(
    model: nn.Module,
    path: Path,
    cache: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> TrainingStep:
    return compile_step(
        model,
        loss_fn,
        optimizer or adamw(model),
        BUDGET_BYTES,
        batches(1)[0],
        checkpoint=path,
        machine=MACHINE,
        cache_dir=cache,
        time_limit_s=PLANNING_S,
    )


def trained(step: TrainingStep, count: int = 3) -> list[float]:
    torch.manual_seed(5)
    return [float(step(batch)) for batch in batches(count)]


def in_eager(path: Path, count: int = 3) -> tuple[list[float], TinyGPT]:
    model = partly_frozen(TinyGPT(blocks=2))
    model.load_state_dict(load_file(path), strict=False)
    optimizer = adamw(model)
    torch.manual_seed(5)
    losses = []
    for batch in batches(count):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def frozen_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if not p.requires_grad)


def up_of(model: nn.Module, block: int) -> nn.Parameter:
    """Return a parameter that is frozen."""
    return model.get_parameter(f"blocks.{block}.up.weight")


def own_file(step: TrainingStep) -> os.stat_result:
    """Return the step's file of values that left memory."""
    changed = step.state_places()["blocks.0.qkv.bias"]
    return os.fstat(changed[0])


def written_bytes() -> int:
    """Return what this process gave to write calls so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def pages(*sizes: int) -> int:
    return sum(-(-size // 4096) * 4096 for size in sizes)


def test_frozen_weights_take_no_place_and_no_writes(path: Path, cache: Path) -> None:
    model, content = outline(), path.read_bytes()
    losses, eager = in_eager(path)
    before = os.stat(path)
    with opened(outline(), path, cache):
        """The plan, and the code that is built once, are kept from here on."""
    written = written_bytes()
    with opened(model, path, cache) as step:
        opening = written_bytes() - written
        # Parameters that are trained with two moments each, and the buffers of the norm, which batches change.
        changing = [p.nbytes for p in model.parameters() if p.requires_grad for _ in range(3)]
        changing += [buffer.nbytes for buffer in model.buffers()]
        assert own_file(step).st_size == pages(*changing)
        assert own_file(step).st_blocks * 512 <= pages(*changing)
        assert trained(step) == losses
        # What was written before the first step: the values that change.
        assert opening < sum(changing) + frozen_bytes(model) // 4
        kept = step.state_dict()["model"]
    assert frozen_bytes(model) == pytest.approx(frozen_bytes(eager))
    for name, value in eager.state_dict().items():
        assert torch.equal(kept[name], value), name
        assert torch.equal(model.state_dict()[name], value), name
    assert path.read_bytes() == content
    after = os.stat(path)
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


def other_bytes(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"12345678")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_bytes, "changed"),
        (cut, "changed"),
        (replaced, "was changed or replaced"),
        (os.remove, "is gone"),
    ],
)
def test_a_file_that_is_another_ends_steps_and_a_checkpoint_goes_on(
    path: Path, cache: Path, tmp_path: Path, spoil: Spoil, words: str
) -> None:
    losses, _ = in_eager(path)
    content = path.read_bytes()
    with opened(outline(), path, cache) as step:
        torch.manual_seed(5)
        first, *rest = batches(3)
        assert float(step(first)) == losses[0]
        step.save(tmp_path / "run")
        spoil(path)
        for _ in range(2):
            with pytest.raises(StorageError, match=words):
                step(rest[0])
            with pytest.raises(StorageError, match=words):
                step.eval(rest[0])
        if spoil in (replaced, os.remove):
            # The open file is the one that it was.
            assert step.save(tmp_path / "other").is_dir()
            assert torch.equal(
                step.state_dict()["model"]["embedding.weight"],
                load_file(tmp_path / "run" / "checkpoint-00000001" / "model-frozen.safetensors")[
                    "embedding.weight"
                ],
            )
            return
        with pytest.raises(StorageError, match=words):
            step.state_dict()
        with pytest.raises(StorageError, match=words):
            step.save(tmp_path / "other")
        # It has the frozen weights, too.
        step.load(tmp_path / "run")
        assert [float(step(batch)) for batch in rest] == losses[1:]
    assert content != path.read_bytes()


def test_values_of_a_changed_file_are_not_given_back(path: Path, cache: Path) -> None:
    _, eager = in_eager(path, 1)
    model = outline()
    step = opened(model, path, cache)
    trained(step, 1)
    other_bytes(path)
    with pytest.raises(StorageError, match="was changed or replaced"):
        step.close()
    step.close()
    for name, parameter in model.named_parameters():
        assert parameter.is_meta != parameter.requires_grad, name
        if parameter.requires_grad:
            assert torch.equal(parameter, eager.get_parameter(name)), name


def test_what_is_written_from_outside_moves_to_a_slot(path: Path, cache: Path) -> None:
    content = path.read_bytes()
    _, eager = in_eager(path, 0)
    model = outline()
    with opened(model, path, cache) as step, torch.no_grad():
        size = own_file(step).st_size
        for changed in (model, eager):
            up_of(changed, 1).mul_(0.5)
        assert own_file(step).st_size == size + pages(up_of(model, 1).nbytes)
        # Values that are the same stay where they are.
        step.load_state_dict(step.state_dict())
        assert own_file(step).st_size == size + pages(up_of(model, 1).nbytes)
        expected = loss_fn(eager.eval(), batches(1)[0])
        assert torch.equal(step.eval(batches(1)[0]), expected)
    assert path.read_bytes() == content
    assert torch.equal(up_of(model, 1), up_of(eager, 1))


def test_unfreezing_moves_to_a_slot(path: Path, cache: Path) -> None:
    content = path.read_bytes()

    def run(
        model: TinyGPT, optimizer: torch.optim.Optimizer, take: Callable[[torch.Tensor], object]
    ) -> None:
        torch.manual_seed(5)
        first, *rest = batches(4)
        take(first)
        up_of(model, 0).requires_grad_(True)
        for batch in rest:
            take(batch)

    def all_of(model: TinyGPT) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    _, eager = in_eager(path, 0)
    optimizer = all_of(eager)

    def plain(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_fn(eager, batch).backward()
        optimizer.step()

    run(eager, optimizer, plain)
    model = outline()
    of_step = all_of(model)
    with opened(model, path, cache, optimizer=of_step) as step:
        run(model, of_step, step)
    for name, value in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert path.read_bytes() == content


def test_checkpoints_of_a_run_are_whole_and_going_on_copies_nothing(
    path: Path, cache: Path, tmp_path: Path
) -> None:
    losses, _ = in_eager(path, 4)
    with opened(outline(), path, cache) as step:
        assert trained(step, 2) == losses[:2]
        folder = step.save(tmp_path / "run")
    saved = load_file(folder / "model-frozen.safetensors")
    plain = load_file(path)
    assert {"embedding.weight", "blocks.0.up.weight"} <= saved.keys()
    for name, value in saved.items():
        assert torch.equal(value, plain[name]), name
    with opened(outline(), path, cache) as step:
        size = own_file(step).st_size
        step.load(tmp_path / "run")
        assert own_file(step).st_size == size
        assert [float(step(batch)) for batch in batches(4)[2:]] == losses[2:]


def test_an_accelerator_reads_them_in_place_too_and_by_saved_plans(
    path: Path, cache: Path, tmp_path: Path
) -> None:
    losses, _ = in_eager(path)
    content = path.read_bytes()
    found = {}
    saved: dict[str, Any] = {"plan": tmp_path / "plans", "budget": None}
    for options in ({}, saved):
        model = outline()
        with on_device(model, adamw(model), cache, checkpoint=path, **options) as step:
            assert trained(step) == losses
            assert step.last_run is not None
            assert step.last_run.link_bytes["nvme->gpu"]
            sizes = step._open_states().persistent.sizes
            frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
            held = sum(size for name, size in sizes.items() if name not in frozen)
            assert own_file(step).st_size < held + 4096 * len(sizes)
            found[len(options)] = step.plan
            step.save_plan(tmp_path / "plans")
    assert found[0] == found[2]
    assert path.read_bytes() == content
