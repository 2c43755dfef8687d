"""While a step is open: reading gives the model's values, writing is taken over, all else says what to do."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gascompile.core.errors import GASCompileError, OpenStepError, UnsupportedOpError
from gascompile.runtime.memory.persistent import Persistent
from gascompile.training.state.holdings import Holdings
from tests.training.open_steps import (
    Trained,
    assert_same,
    forward,
    saved,
    trained_and_open,
    trained_in_torch,
)
from tests.training.runs import adamw, batches, compiled, loss_fn, new_model, plain_step

NAME = "blocks.0.up.weight"
Touch = Callable[["Trained"], Any]


def on(*changes: Callable[[Any], object]) -> Touch:
    """Return a touch that changes the weight without gradients."""

    def touch(trained: Trained) -> None:
        with torch.no_grad():
            for change in changes:
                change(trained.weight)

    return touch


def averaged(trained: Trained) -> Any:
    ema = AveragedModel(new_model(), multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    ema.update_parameters(trained.model)
    ema.update_parameters(trained.model)
    return ema.state_dict()


def blended(trained: Trained) -> Any:
    kept = torch.ones_like(trained.weight, requires_grad=False)
    return kept.lerp_(trained.weight.detach(), 0.25)


def reloaded(trained: Trained) -> Any:
    other = new_model(3).state_dict()
    trained.model.load_state_dict(other)
    return trained.model.state_dict()


def through_vector(trained: Trained) -> None:
    vector = parameters_to_vector(trained.model.parameters()).detach()
    vector_to_parameters(vector * 2, trained.model.parameters())


def optimizer_reloaded(trained: Trained) -> Any:
    state = copy.deepcopy(trained.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] *= 0.5
    trained.optimizer.load_state_dict(state)
    return trained.optimizer.state_dict()


def forward_that_counts(trained: Trained) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        return loss_fn(trained.model, batches(1)[0]), trained.mean.clone()


def each_written(trained: Trained) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(trained.model.parameters()), 0.5)
        for part in trained.weight.unbind()[:3]:
            part.add_(1)
        trained.weight[3:5, ::2] = 7
        trained.weight.view(-1)[9:12].zero_()
        trained.weight.t()[0].neg_()


READ: dict[str, Touch] = {
    "sum": lambda t: t.weight.sum(),
    "norm": lambda t: [p.norm() for p in t.model.parameters()],
    "comparison": lambda t: (t.weight > 0).float(),
    "item": lambda t: t.weight[0, 0].item(),
    "tolist": lambda t: t.weight.tolist(),
    "numpy": lambda t: t.weight.detach().numpy(),
    "array": lambda t: np.asarray(t.weight.detach()),
    "data": lambda t: t.weight.data.clone(),
    "detach": lambda t: t.weight.detach() + 1,
    "slice": lambda t: t.weight[2:4, 1].clone(),
    "product": lambda t: (torch.ones(2, 64) @ t.weight.t()).detach(),
    "half": lambda t: t.weight.half(),
    "repr": lambda t: repr(t.weight),
    "format": lambda t: f"{t.weight.data[0, 0]:.3f}",
    "shape": lambda t: (t.weight.shape, t.weight.stride(), t.weight.numel(), str(t.weight.dtype)),
    "kind": lambda t: (
        isinstance(t.weight, nn.Parameter),
        t.weight.is_leaf,
        t.weight.requires_grad,
    ),
    "size of the model": lambda t: sum(p.nbytes for p in t.model.parameters()),
    "vector": lambda t: parameters_to_vector(t.model.parameters()).detach(),
    "buffer": lambda t: t.mean.clone(),
    "deepcopy of a parameter": lambda t: copy.deepcopy(t.weight),
    "deepcopy of a state": lambda t: copy.deepcopy(t.model.state_dict()),
    "deepcopy of the model": lambda t: copy.deepcopy(t.model).state_dict(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.weight)),
    "state_dict": lambda t: t.model.state_dict(),
    "state_dict of a part": lambda t: t.model.blocks.state_dict(),
    "state_dict with tensors": lambda t: {
        k: v.detach().clone() for k, v in t.model.state_dict(keep_vars=True).items()
    },
    "torch.save": lambda t: saved(t.model.state_dict()),
    "torch.save of the model": lambda t: saved(t.model).state_dict(),
    "torch.save of the optimizer": lambda t: saved(t.optimizer.state_dict()),
    "state_dict of the optimizer": lambda t: t.optimizer.state_dict(),
    "average": averaged,
    "average by lerp_": blended,
    "foreach": lambda t: torch._foreach_norm([p.detach() for p in t.model.parameters()]),
    "forward": forward,
    "functional_call": lambda t: torch.func.functional_call(
        t.model.eval(), {n: p.detach() for n, p in t.model.named_parameters()}, batches(1)[0]
    ).detach(),
    "zero_grad": lambda t: t.optimizer.zero_grad(),
    "zero_grad of the model": lambda t: t.model.zero_grad(),
}
WRITTEN: dict[str, Touch] = {
    "clamp_": on(lambda p: p.clamp_(-0.05, 0.05)),
    "clamp_ of data": lambda t: t.weight.data.clamp_(-0.05, 0.05),
    "copy_": on(lambda p: p.copy_(torch.ones_like(p))),
    "data": lambda t: setattr(t.weight, "data", torch.ones(256, 64)),
    "init": lambda t: nn.init.constant_(t.weight, 0.5),
    "index": on(lambda p: p.__setitem__((0, slice(3)), 2.0)),
    "out": on(lambda p: torch.mul(p, 2, out=p)),
    "each": each_written,
    "buffer": lambda t: t.mean.fill_(0.5),
    "vector": through_vector,
    "load_state_dict": reloaded,
    "load_state_dict of a part": lambda t: t.model.blocks.load_state_dict(
        new_model(3).blocks.state_dict()
    ),
    "load_state_dict of the optimizer": optimizer_reloaded,
    "forward in training mode": forward_that_counts,
    "reset_parameters": lambda t: t.model.norm.reset_parameters(),
}
REFUSED: dict[str, Touch] = {
    "step of the optimizer": lambda t: t.optimizer.step(),
    "step of another": lambda t: torch.optim.SGD(t.model.parameters(), lr=0.1).step(),
    "data_ptr": lambda t: t.weight.data_ptr(),
    "storage": lambda t: t.weight.untyped_storage(),
    "old storage": lambda t: t.weight.storage(),
    "dlpack": lambda t: t.weight.detach().__dlpack__(),
    "set_": on(lambda p: p.set_(torch.ones(1))),
    "resize_": on(lambda p: p.data.resize_(3)),
    "transpose_": on(lambda p: p.data.t_()),
    "shared memory": lambda t: t.weight.share_memory_(),
    "gradient": lambda t: setattr(t.weight, "grad", torch.ones(256, 64)),
    "gradient hook": lambda t: t.weight.register_hook(lambda g: g),
    "accumulation hook": lambda t: t.weight.register_post_accumulate_grad_hook(lambda _: None),
    "another dtype": lambda t: t.model.double(),
    "data of another shape": lambda t: setattr(t.weight, "data", torch.ones(3)),
}
REFUSED_BY_THE_STEP: dict[str, Touch] = {
    "backward": lambda t: loss_fn(t.model, batches(1)[0]).backward(),
    "another layer": lambda t: setattr(t.model.blocks[0], "up", nn.Linear(64, 256)),
    "another parameter": lambda t: setattr(t.model.norm, "weight", nn.Parameter(torch.ones(64))),
    "one more": lambda t: t.model.register_buffer("late", torch.ones(1)),
    "assigned": lambda t: t.model.load_state_dict(new_model(2).state_dict(), assign=True),
}


@pytest.fixture
def plain() -> Trained:
    return trained_in_torch()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Trained]:
    with trained_and_open(tmp_path) as trained:
        yield trained


def test_reading_gives_the_values(opened: Trained, plain: Trained) -> None:
    for name, touch in READ.items():
        assert_same(touch(opened), touch(plain), name)
    assert opened.step is not None
    assert_same(opened.step.state_dict()["model"], plain.model.state_dict(), "in the end")


def test_writing_is_taken_over(opened: Trained, plain: Trained) -> None:
    for name, touch in WRITTEN.items():
        assert_same(touch(opened), touch(plain), name)
        assert_same(opened.model.state_dict(), plain.model.state_dict(), name)
    assert opened.step is not None
    torch.manual_seed(6)
    loss = opened.step(batches(2)[1])
    torch.manual_seed(6)
    assert float(loss) == plain_step(plain.model, plain.optimizer, batches(2)[1])
    opened.step.close()
    assert_same(opened.model.state_dict(), plain.model.state_dict(), "closed")
    assert_same(opened.optimizer.state_dict(), plain.optimizer.state_dict(), "closed")


def test_all_else_says_what_to_do(opened: Trained) -> None:
    assert opened.step is not None
    before = opened.step.state_dict()
    for name, touch in REFUSED.items():
        with pytest.raises(OpenStepError, match=r"close|loss_fn|leave out"):
            touch(opened)
        assert_same(opened.step.state_dict(), before, name)
    opened.step(batches(1)[0])


@pytest.mark.parametrize("name", REFUSED_BY_THE_STEP)
def test_what_a_step_cannot_follow_ends_it(name: str, opened: Trained) -> None:
    assert opened.step is not None
    REFUSED_BY_THE_STEP[name](opened)
    with pytest.raises((OpenStepError, UnsupportedOpError), match=r"loss_fn|compile a new one"):
        opened.step(batches(1)[0])


def test_arrays_cannot_be_written_to(opened: Trained) -> None:
    for array in (opened.weight.detach().numpy(), np.asarray(opened.weight.detach())):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_views_outlive_the_step(opened: Trained) -> None:
    view, whole = opened.weight.data[0], opened.weight
    assert opened.step is not None
    opened.step.close()
    assert whole is opened.weight
    assert type(whole) is nn.Parameter
    assert torch.equal(view, whole[0])
    view.fill_(3)
    assert whole[0].eq(3).all()


def test_safetensors_are_whole(opened: Trained, plain: Trained, tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_model(opened.model, str(tmp_path / "model.safetensors"))
    other = new_model(4)
    torch_files.load_model(other, str(tmp_path / "model.safetensors"))
    assert_same(other.state_dict(), plain.model.state_dict(), "saved")


def test_save_pretrained_and_generate(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=1,
        n_head=2,
        vocab_size=64,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 64, (2, 8))

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return found

    from gascompile import compile_step
    from tests.training.runs import MACHINE

    with compile_step(
        model, loss_of, adamw(model), "64MiB", tokens, machine=MACHINE, cache_dir=tmp_path
    ) as step:
        step(tokens)
        model.save_pretrained(tmp_path / "saved")
        model.eval()
        found = model.generate(tokens[:1], max_new_tokens=4, do_sample=False)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert_same(again.state_dict(), model.state_dict(), "saved")
    assert torch.equal(model.generate(tokens[:1], max_new_tokens=4, do_sample=False), found)


def test_a_dropped_step_gives_its_values_back(
    tmp_path: Path, plain: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model().train()
    optimizer = adamw(model)
    step = compiled(model, optimizer, tmp_path)
    torch.manual_seed(5)
    step(batches(1)[0])
    with caplog.at_level(logging.WARNING):
        del step
        gc.collect()
    assert "dropped without close()" in caplog.text
    assert_same(model.state_dict(), plain.model.state_dict(), "model")
    assert_same(optimizer.state_dict(), plain.optimizer.state_dict(), "optimizer")


def test_values_after_a_failed_step_are_not_given_for_whole(opened: Trained) -> None:
    assert opened.step is not None
    opened.step._holdings.failure = "planned by the test"
    with pytest.raises(GASCompileError, match="half updated"):
        opened.model.state_dict()
    opened.step._holdings.failure = ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_who_is_interrupted_while_dropping_a_step_has_its_values(
    first: str, tmp_path: Path, plain: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Holdings) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Holdings, "dropped", interrupted)
    model = new_model().train()
    optimizer = adamw(model)
    step = compiled(model, optimizer, tmp_path)
    torch.manual_seed(5)
    step(batches(1)[0])
    del step
    gc.collect()
    for part in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
        found, expected = (model, plain.model) if part == "model" else (optimizer, plain.optimizer)
        assert_same(found.state_dict(), expected.state_dict(), part)
    assert all(type(value) is nn.Parameter for value in model.parameters())
    with compiled(model, optimizer, tmp_path) as again:
        again(batches(1)[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_new_step_waits_for_the_end_of_one_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Persistent.close
    are_back = threading.Event()

    def interrupted(_: Holdings) -> None:
        raise KeyboardInterrupt

    def slowly(persistent: Persistent) -> None:
        are_back.set()
        time.sleep(0.5)
        close(persistent)

    monkeypatch.setattr(Holdings, "dropped", interrupted)
    model = new_model().train()
    optimizer = adamw(model)
    step = compiled(model, optimizer, tmp_path)
    step(batches(1)[0])
    monkeypatch.setattr(Persistent, "close", slowly)
    del step
    gc.collect()
    assert are_back.wait(60)
    with compiled(model, optimizer, tmp_path) as again:
        again(batches(1)[0])


def test_an_open_parameter_is_not_swapped_for_another_tensor(opened: Trained) -> None:
    before = {name: value.clone() for name, value in opened.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(opened.weight, nn.Parameter(torch.zeros_like(before[NAME])))
    assert_same(opened.model.state_dict(), before, "model")
    assert opened.step is not None
    opened.step.close()
    assert_same(opened.model.state_dict(), before, "model")
    torch.utils.swap_tensors(opened.weight, nn.Parameter(torch.zeros_like(before[NAME])))
    assert not opened.weight.any()
