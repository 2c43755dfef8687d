"""Which losses a pipeline may compute in micro-batches, against the mean of eager's over the parts of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile.training.capture.joint import capture_joint
from gascompile.training.pipeline.provable import split_rows, what_differs, why_whole
from tests.distributed.test_rank_means import of_length_one

ROWS, WIDTH = 8, 6
TOKEN = torch.ones(1, WIDTH)
Made = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ALIKE: dict[str, Made] = {
    "squares": functional.mse_loss,
    "classes": lambda x, y: functional.cross_entropy(x, y.argmax(1)),
    "two": lambda x, y: functional.l1_loss(x, y) / 3 + 0.1 * x.square().mean(),
    "row by row": lambda x, y: ((x - y).square().sum(1) / x.shape[1]).mean(),
    "as large as real": lambda x, _: functional.binary_cross_entropy_with_logits(
        x, torch.ones(len(x), WIDTH)
    ),
    "one class": lambda x, _: functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "groups": lambda x, y: functional.mse_loss(functional.group_norm(x, 2), y),
    "of features": lambda x, y: functional.mse_loss(x * torch.arange(WIDTH), y),
    "seen apart": lambda x, y: functional.mse_loss(x.view(len(x), 2, -1).flatten(1), y),
}
OTHER: dict[str, Made] = {
    "by rows": lambda x, y: functional.mse_loss(x, y) * len(x),
    "through rows": lambda x, y: functional.mse_loss(x, y) / len(x),
    "by rows within": lambda x, y: functional.mse_loss(x / len(x), y),
    "by a tensor of rows": lambda x, y: functional.mse_loss(x * torch.tensor(1.0 / len(x)), y),
    "by what rows make": lambda x, y: functional.mse_loss(x * torch.ones(len(x)).sum(), y),
    "by places": lambda x, y: functional.mse_loss(x * torch.arange(1.0, len(x) + 1)[:, None], y),
    "to places": lambda x, _: functional.mse_loss(
        x, torch.arange(float(len(x)))[:, None].expand(-1, WIDTH)
    ),
    "to its own place": lambda x, _: functional.cross_entropy(x.repeat(1, 2), torch.arange(len(x))),
    "to what rows are": lambda x, _: functional.mse_loss(
        x, torch.full((len(x), WIDTH), 1 / len(x))
    ),
    "times itself": lambda x, y: (loss := functional.mse_loss(x, y)) * loss,
    "beside itself": lambda x, y: (
        (loss := functional.mse_loss(x, y)) / loss.detach() + x.mean() * 0
    ),
    "turned": lambda x, y: functional.mse_loss(x - y if len(x) > 5 else y - x, x),
    "as wide as rows": lambda x, _: x[:, :1].expand(-1, len(x)).sum(1).square().mean(),
    "beside tokens": lambda x, y: (
        functional.mse_loss(x, y) + TOKEN.expand(len(x), -1).square().sum()
    ),
    "by tokens": lambda x, y: functional.mse_loss(x, y) * TOKEN.expand(len(x), -1).abs().sum(),
    "by a loss of ones": lambda x, y: functional.mse_loss(
        x * functional.l1_loss(torch.ones(len(x)), torch.zeros(len(x)), reduction="sum"), y
    ),
    "rows as classes": lambda x, _: functional.nll_loss(
        x.log_softmax(1).t(), torch.zeros(WIDTH, dtype=torch.long)
    ),
    "counted": lambda x, y: (
        functional.mse_loss(x, y) + (33 * functional.l1_loss(x, y)).long().float()
    ),
    "gradients of length one": lambda x, y: functional.mse_loss(of_length_one(x), y),
    "contrasts": lambda x, _: functional.cross_entropy(x @ x.t(), torch.arange(len(x))),
    "centred": lambda x, y: functional.mse_loss(x - x.mean(0), y),
    "a sum": lambda x, y: functional.mse_loss(x, y, reduction="sum"),
    "a root": lambda x, y: functional.mse_loss(x, y).sqrt(),
}


def found(made: Made, count: int) -> tuple[str, bool]:
    """Return why a loss has no micro-batches, and whether eager's mean over them is that of the batch."""
    torch.manual_seed(0)
    model, batch = nn.Linear(WIDTH, WIDTH), [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)]

    def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return made(model(batch[0]), batch[1])

    parts = zip(*(tensor.chunk(count) for tensor in batch), strict=True)
    mean = torch.stack([loss_fn(model, list(part)) for part in parts]).mean()
    weights = list(model.parameters())
    whole, divided = (
        [of, *torch.autograd.grad(of, weights)] for of in (loss_fn(model, batch), mean)
    )
    pairs = zip(whole, divided, strict=True)
    is_same = all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs)
    joint = capture_joint(model, loss_fn, batch)
    if why := why_whole(joint, ROWS):
        return why, is_same
    part, _ = split_rows(batch, count)
    return what_differs(joint, capture_joint(model, loss_fn, part), ROWS, count), is_same


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", ALIKE)
def test_means_of_rows_are_divided(name: str, count: int) -> None:
    assert found(ALIKE[name], count) == ("", True)


def test_weights_of_classes_are_not_those_of_rows() -> None:
    """Six of six classes: a tensor of the batch is broadcast over classes, and would weigh rows in parts of one."""
    model, batch = nn.Linear(6, 6), [torch.randn(6, 6), torch.rand(6)]

    def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        x, weight = batch
        return functional.binary_cross_entropy_with_logits(model(x), x.sigmoid(), weight)

    assert why_whole(capture_joint(model, loss_fn, batch), 6)


def test_a_mask_without_heads_is_of_places() -> None:
    """Four rows of four tokens: a mask of rows is broadcast over what is looked at, and would be in parts of one."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            query = self.query(x)[:, None]
            return functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    def why(mask: torch.Tensor) -> str:
        batch = [torch.randn(4, 4, WIDTH), mask]
        model = Attention()
        joint = capture_joint(model, lambda model, b: model(*b).square().mean(), batch)
        return why_whole(joint, 4)

    assert not why(torch.randn(4, 1, 1, 4))
    assert "may know of each other" in why(torch.randn(4, 4))


@pytest.mark.parametrize("by_count", [False, True])
def test_words_may_be_weighed_by_how_often_they_are_there(by_count: bool) -> None:
    model = nn.Embedding(5, WIDTH, scale_grad_by_freq=by_count)
    joint = capture_joint(model, lambda model, b: model(b).square().mean(), torch.arange(8) % 5)
    assert ("may know of each other" in why_whole(joint, 8)) is by_count


def test_hooks_of_modules_may_change_gradients() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    batch = torch.randn(ROWS, WIDTH)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    assert not why_whole(capture_joint(model, loss_fn, batch), ROWS)
    model[1].register_full_backward_hook(lambda *_: None)
    assert "hook" in why_whole(capture_joint(model, loss_fn, batch), ROWS)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("name", OTHER)
def test_what_would_be_another_loss_is_not(name: str, count: int) -> None:
    why, is_same = found(OTHER[name], count)
    assert why
    assert not is_same
