"""Decisions of a loss over tensors that depend on nothing: taken as eager takes them, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError

Loss = Callable[[nn.Module, Any], torch.Tensor]


def by_positions(model: nn.Module, x: torch.Tensor) -> Any:
    """Decide as libraries do whether positions count up by one."""
    positions = torch.arange(x.shape[1])[None]
    steps = torch.diff(positions, prepend=positions[:, :1] - 1)
    if ((steps != 1).cumsum(-1)[:, -1] == 0).all():
        return model(x).square().mean()
    return model(x).abs().mean()


def by_item(model: nn.Module, x: torch.Tensor) -> Any:
    """Take a number out of a tensor."""
    return model(x).square().mean() * torch.arange(5)[3].item()


def by_written(model: nn.Module, x: torch.Tensor) -> Any:
    """Write to a view of what is decided over."""
    numbers = torch.arange(4)
    numbers.view(2, 2)[0].add_(5)
    return model(x).square().mean() * (2 if (numbers > 4).any() else 1)


def by_item_set(model: nn.Module, x: torch.Tensor) -> Any:
    """Write a number of the batch into what is decided over."""
    numbers = torch.zeros(4, dtype=torch.int64)
    numbers[0] = x.argmax()
    return model(x).square().mean() * (2 if numbers.any() else 1)


def by_random(model: nn.Module, x: torch.Tensor) -> Any:
    """Decide by a number that is drawn anew at each step."""
    return model(x).square().mean() * (2 if torch.randint(0, 2, (1,)).bool() else 1)


def by_batch(model: nn.Module, x: torch.Tensor) -> Any:
    """Decide over the batch."""
    return model(x).square().mean() * (2 if (x > 0).all() else 1)


def by_parameter(model: nn.Module, x: torch.Tensor) -> Any:
    """Decide over a weight, rounded to integers."""
    weight = next(model.parameters())
    return model(x).square().mean() * (2 if weight.long().any() else 1)


def ran(model: nn.Module, loss_fn: Loss, batches: list[torch.Tensor], *, planned: bool) -> Any:
    """Return losses and weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    if planned:
        with gascompile.compile_step(model, loss_fn, optimizer, "16MiB", batches[0]) as step:
            losses = [step(batch) for batch in batches]
    else:
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses, [p.detach().clone() for p in model.parameters()]


def assert_like_eager(model: nn.Module, loss_fn: Loss, batches: list[torch.Tensor]) -> None:
    """Compare bits."""
    expected = ran(copy.deepcopy(model), loss_fn, batches, planned=False)
    found = ran(model, loss_fn, batches, planned=True)
    for values, others in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@pytest.mark.parametrize("loss_fn", [by_positions, by_item])
def test_what_depends_on_nothing_is_decided_as_in_eager(loss_fn: Loss) -> None:
    """Tensors made of constants have values while a loss is traced."""
    torch.manual_seed(0)
    batches = [torch.randn(2, 6) for _ in range(2)]
    assert_like_eager(nn.Linear(6, 6), loss_fn, batches)


@pytest.mark.parametrize("loss_fn", [by_written, by_item_set, by_random, by_batch, by_parameter])
def test_what_may_change_is_refused(loss_fn: Loss) -> None:
    """What was written to, drawn or given is no constant."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError):
        gascompile.compile_step(model, loss_fn, optimizer, "16MiB", torch.randn(2, 6))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_base_in_bfloat16_with_adapters_is_eagers() -> None:
    """Attention takes the kernel that eager takes, without a mask and without repeated heads."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    wanted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, wanted).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()

    def loss_fn(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    assert_like_eager(model, loss_fn, [torch.randint(0, 64, (2, 16)) for _ in range(3)])
