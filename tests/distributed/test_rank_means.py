"""Losses of ranks that are means over rows or over targets, against eager on all rows; and those that are none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from gascompile.core.errors import UnsupportedOpError
from gascompile.training.capture.joint import Joint, capture_joint
from gascompile.training.capture.rank_loss import RankLoss
from gascompile.training.planning.rank_means import require_mean
from gascompile.training.planning.row_draws import with_more_rows
from tests.distributed import means_worker
from tests.distributed.jobs import FilledOnce
from tests.distributed.means_worker import CHANGED, COUNTED
from tests.distributed.test_ranks import close, left_by, run_forked_job


@pytest.fixture(scope="module")
def left(filled_once: FilledOnce) -> list[dict[str, Any]]:
    def fill(folder: Path) -> None:
        codes = run_forked_job(folder, 2, worker="tests.distributed.means_worker")
        assert codes == [0, 0], [(folder / f"log-{r}").read_text()[-3000:] for r in range(2)]

    return left_by(filled_once("rank means", fill), 2, "means")


@pytest.mark.parametrize("name", COUNTED)
def test_targets_are_counted_over_all_ranks(left: list[dict[str, Any]], name: str) -> None:
    counted = COUNTED[name]
    model, optimizer = means_worker.made()
    losses = []
    for batch in counted.batches():
        loss = counted.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(counted.loss(model, counted.batches()[0]))
    for rank in left:
        close(rank[name]["losses"], losses)
        close(rank[name]["model"], model.state_dict())


@pytest.mark.parametrize("name", [*CHANGED, "rate, other rows"])
def test_other_constants_of_one_rank_are_refused_on_all(
    left: list[dict[str, Any]], name: str
) -> None:
    for rank in left:
        assert "rank 1 and rank 0 differ" in rank[name]


class _OfLengthOne(torch.autograd.Function):
    """What has gradients of length one, over all rows."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = gradient / gradient.norm()
        return found


def of_length_one(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, with such gradients."""
    found: torch.Tensor = _OfLengthOne.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return found


def hooked(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x.register_hook(lambda gradient: gradient * len(gradient))
    return x


def swapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return two terms, of which many rows weigh the other one."""
    one, other = x[:, :3].square(), x[:, 3:] * y[:, :3]
    first, second = (one, other) if len(x) < 6 else (other, one)
    return first.mean() + 0.1 * second.mean()


@torch.library.custom_op("gascompile_tests::sort", mutates_args=())
def sort(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``x`` without its mean over rows; named like an op that keeps them apart."""
    return x - x.mean(0)


sort.register_fake(lambda x, dim: torch.empty_like(x))
sort.register_autograd(lambda _, gradient: (gradient - gradient.mean(0), None))

Made = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NORMED = nn.BatchNorm1d(6)
MEANS: dict[str, Made] = {
    "a loss": functional.mse_loss,
    "two": lambda x, y: functional.mse_loss(x, y) + 0.1 * x.abs().mean() / 3,
    "by hand": lambda x, y: ((x - y) ** 2).sum() / len(x),
    "by its elements": lambda x, _: x.square().sum() * (1 / x.numel()),
    "of a divergence": lambda x, y: functional.kl_div(x, y.softmax(1), reduction="batchmean"),
    "weighed": lambda x, y: (functional.mse_loss(x, y, reduction="none") * (y > 0)).mean(),
    "a list": lambda x, y: torch.stack([x.mean(), functional.l1_loss(x, y)]).sum(),
    "feature by feature": lambda x, _: x.square().mean(0).sum(),
    "soft targets": lambda x, y: functional.cross_entropy(x, y.softmax(1)),
    "classes": lambda x, y: functional.cross_entropy(x, y.argmax(1)),
    "masked targets": lambda x, y: (
        functional.cross_entropy(x, y.argmax(1), reduction="none") * (y[:, 0] > 0)
    ).mean(),
    "dropout": lambda x, y: functional.mse_loss(functional.dropout(x, 0.3), y),
    "depth": lambda x, y: functional.mse_loss(x * (torch.rand(len(x), 1) < 0.7), y),
    "as large as real": lambda x, _: functional.binary_cross_entropy_with_logits(
        x, torch.ones(len(x), 6)
    ),
    "as small as false": lambda x, _: functional.mse_loss(x, x.new_ones(len(x), 6) * 0.9),
    "one class": lambda x, _: functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "groups": lambda x, y: functional.mse_loss(functional.group_norm(x, 2), y),
    "through ones": lambda x, _: x.square().sum() / torch.ones(len(x)).sum(),
    "through a tensor": lambda x, _: x.square().sum() / torch.tensor(float(len(x))),
    "class weights": lambda x, y: functional.cross_entropy(x, y.argmax(1), torch.arange(1.0, 7)),
    "by its own class": lambda x, y: x[torch.arange(len(x)), y.argmax(1)].mean(),
    "a mask of places": lambda x, y: (
        (y > 0)[torch.arange(len(x))[:, None, None], torch.arange(6)] * x[:, None]
    ).mean(),
    "after a token": lambda x, _: (
        torch.cat([NORMED.weight.expand(len(x), 6), x], 1).square().mean()
    ),
    "shifted": lambda x, y: functional.mse_loss(
        torch.slice_scatter(x.new_zeros(len(x), 6), x[:, :-1], 1, 1), y
    ),
    "columns first": lambda x, y: functional.mse_loss(x.t().reshape(-1), y.t().reshape(-1)),
    "of features": lambda x, y: functional.mse_loss(x / x.shape[1], y * torch.arange(6.0)),
    "beside a penalty": lambda x, y: (
        1 - functional.mse_loss(x, y) + 0.1 * NORMED.weight.square().sum()
    ),
    "for its gradients": lambda x, y: functional.mse_loss(x, y) + 0 * x.sum(),
    "smoothed": lambda x, y: functional.cross_entropy(x, y.argmax(1), label_smoothing=0.1),
    "smoothed, with class weights": lambda x, y: functional.cross_entropy(
        x, y.argmax(1), torch.arange(1.0, 7), label_smoothing=0.1
    ),
    "lengths of rows": lambda x, y: (x - y).norm(dim=1).mean(),
    "of a token": lambda x, y: (
        functional.mse_loss(x, y) + NORMED.weight.expand(len(x), 6).square().mean()
    ),
    "batch norm": lambda x, y: functional.mse_loss(
        functional.batch_norm(x, None, None, training=True), y
    ),
}
NONE: dict[str, Made] = {
    "a sum": lambda x, y: functional.mse_loss(x, y, reduction="sum"),
    "a sum of classes": lambda x, y: functional.cross_entropy(x, y.argmax(1), reduction="sum"),
    "a sum by a fixed number": lambda x, _: x.square().sum() / 8,
    "beside a mean": lambda x, y: functional.mse_loss(x, y) + 0.1 * x.square().sum(),
    "the largest": lambda x, _: x.square().max(),
    "a deviation": lambda x, _: x.std(),
    "by rows": lambda x, y: functional.mse_loss(x, y) * len(x),
    "by rows, beside a mean": lambda x, y: x.abs().mean() + functional.mse_loss(x, y) / len(x),
    "by a tensor": lambda x, y: functional.mse_loss(x, y) * torch.tensor(float(len(x))).sqrt(),
    "by ones": lambda x, y: functional.mse_loss(x, y) * torch.ones(len(x)).sum(),
    "by half the rows": lambda x, y: functional.mse_loss(x, y) * (len(x) // 2),
    "a root": lambda x, y: functional.mse_loss(x, y).sqrt(),
    "a root by hand": lambda x, y: ((x - y).square().sum() / x.numel()).sqrt(),
    "a logarithm by hand": lambda x, _: -(x.softmax(1)[:, 0].sum() / len(x)).log(),
    "beside a mean by hand": lambda x, y: (
        functional.mse_loss(x, y) + (x.square().sum() / len(x)) ** 2
    ),
    "a ridge": lambda x, y: ((x - y).square().sum() + NORMED.weight.square().sum()) / len(x),
    "from a penalty": lambda x, y: (
        (NORMED.weight.abs().sum() - functional.mse_loss(x, y, reduction="sum")) / len(x)
    ),
    "a number by rows": lambda x, y: (functional.mse_loss(x, y) * len(x) + 3.0) / len(x),
    "stacked with a penalty": lambda x, _: (
        torch.stack([x.square().sum(), NORMED.weight.square().sum()]).sum() / len(x)
    ),
    "feature by feature, with a penalty": lambda x, _: (
        (x.square().sum(0) + NORMED.weight.square()) / len(x)
    ).sum(),
    "tokens": lambda x, y: (
        functional.mse_loss(x, y) + 0.1 * NORMED.weight.expand(len(x), 6).square().sum()
    ),
    "the length of tokens": lambda x, y: (
        functional.mse_loss(x, y) + 0.1 * NORMED.weight.expand(len(x), 6).norm()
    ),
}
UNKNOWN: dict[str, Made] = {
    "by a mask": lambda x, y: (x * (y > 0)).sum() / (y > 0).sum(),
    "contrasts": lambda x, _: functional.cross_entropy(x @ x.t(), torch.arange(len(x))),
    "centred": lambda x, y: functional.mse_loss(x - x.mean(0), y),
    "by tokens": lambda x, y: (
        functional.mse_loss(x, y) * NORMED.weight.expand(len(x), 6).square().sum()
    ),
    "by a tensor of rows elsewhere": lambda x, y: (
        (x - y).square().sum() / (n := torch.tensor(float(len(x)))) + 0.1 * n * NORMED.weight.sum()
    ),
    "by a loss of ones": lambda x, y: functional.mse_loss(
        x * functional.l1_loss(torch.ones(len(x)), torch.zeros(len(x)), reduction="sum"), y
    ),
    "smoothed by rows": lambda x, y: functional.cross_entropy(
        x, y.argmax(1), label_smoothing=1 / len(x)
    ),
    "rows as classes": lambda x, _: functional.nll_loss(
        x.log_softmax(1).t(), torch.zeros(6, dtype=torch.long)
    ),
    "rounded": lambda x, y: torch.div(functional.mse_loss(x, y), 0.3, rounding_mode="floor"),
    "counted": lambda x, y: functional.mse_loss(x, y) + functional.mse_loss(x, y).long().float(),
    "gradients of length one": lambda x, y: functional.mse_loss(of_length_one(x), y),
    "gradients by rows": lambda x, y: functional.mse_loss(hooked(x), y),
    "centred by an op of its own": lambda x, y: functional.mse_loss(sort(x, 1), y),
    "of places": lambda x, _: functional.mse_loss(x, torch.arange(6.0).expand(len(x), 6).cumsum(0)),
    "the first": lambda x, _: x[0].mean(),
    "squares of loads": lambda x, _: (x.softmax(1).mean(0) ** 2).sum(),
    "by rows within": lambda x, y: functional.mse_loss(x / len(x), y),
    "by a tensor of rows": lambda x, y: functional.mse_loss(x * torch.tensor(1.0 / len(x)), y),
    "by what rows make": lambda x, y: functional.mse_loss(x * torch.ones(len(x)).sum(), y),
    "sums as large as rows": lambda x, _: x[:, :1].expand(-1, len(x)).sum(1).square().mean(),
    "times itself": lambda x, y: (loss := functional.mse_loss(x, y)) * loss,
    "through itself": lambda x, y: (loss := x.square().mean()) / loss.detach() + y.mean(),
    "a penalty by rows": lambda x, y: (
        functional.mse_loss(x, y) + 0.1 / len(x) * NORMED.weight.square().sum()
    ),
    "added by rows": lambda x, y: torch.add(functional.mse_loss(x, y), x.mean(), alpha=len(x)),
    "expanded": lambda x, y: functional.mse_loss(x, y).expand(len(x)).sum(),
    "stacked": lambda x, y: torch.stack([functional.mse_loss(x, y)] * len(x)).sum(),
    "to what rows are": lambda x, _: functional.mse_loss(x, torch.full((len(x), 6), 1 / len(x))),
    "noise by rows": lambda x, y: functional.mse_loss(x + torch.randn(len(x), 6) / len(x), y),
    "weights of a batch": lambda x, y: functional.cross_entropy(
        x, y.argmax(1), y.softmax(1).mean(0)
    ),
    "positive weights of a batch": lambda x, y: (
        functional.binary_cross_entropy_with_logits(
            x, y.sigmoid(), pos_weight=y.sigmoid().mean(0), reduction="sum"
        )
        / len(x)
    ),
    "other terms": swapped,
    "none of a few rows": lambda x, y: (
        functional.mse_loss(x, y) if len(x) > 5 else NORMED.weight.square().sum() + 0 * x.sum()
    ),
    "the length of a token": lambda x, y: (
        functional.mse_loss(x, y) + NORMED.weight.expand(len(x), 6).square().mean().sqrt()
    ),
    "another op": lambda x, y: functional.mse_loss(x - y if len(x) > 5 else y - x, x),
    "the other way round": lambda x, y: functional.mse_loss(x[torch.arange(len(x)).flip(0)], y),
    "round and round": lambda x, y: functional.mse_loss(x[torch.arange(len(x)) % 4], y),
    "without the first": lambda x, y: functional.mse_loss(
        torch.slice_scatter(x, torch.zeros(1, 6), 0, 0, 1), y
    ),
    "the first chunk": lambda x, _: x.split(5)[0].mean(),
    "unseen targets": lambda x, y: torch.ops.aten.nll_loss_nd(x, y.argmax(1), None, 1),
}


def looked_at(made: Made, rows: int = 4) -> None:
    """Prove a loss of a layer's result and of the batch, as planning does."""
    model, batch = nn.Linear(6, 6), (torch.randn(rows, 6), torch.randn(rows, 6))
    loss = RankLoss(lambda model, batch: made(model(batch[0]), batch[1]), 2)

    def more(batch: Any) -> tuple[Any, Joint]:
        wide = with_more_rows(batch)
        return wide, capture_joint(model, loss, wide)

    require_mean(capture_joint(model, loss, batch), batch, more, warns=True)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", MEANS)
def test_means_are_proven(name: str, rows: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looked_at(MEANS[name], rows)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", NONE)
def test_what_is_no_mean_is_refused(name: str, rows: int) -> None:
    with pytest.raises(
        UnsupportedOpError, match=r"is no mean over rows.*let loss_fn return a mean"
    ):
        looked_at(NONE[name], rows)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_said(name: str) -> None:
    with pytest.warns(UserWarning, match=r"that is not known.*let loss_fn return a mean"):
        looked_at(UNKNOWN[name])


def test_a_loss_of_a_few_rows_may_be_of_none() -> None:
    model, batch = nn.Linear(6, 6), torch.randn(4, 6)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        of = model(batch) if len(batch) > 5 else next(model.parameters())
        loss: torch.Tensor = of.square().mean()
        return loss

    loss = RankLoss(loss_fn, 2)

    def more(batch: Any) -> tuple[Any, Joint]:
        wide = with_more_rows(batch)
        return wide, capture_joint(model, loss, wide)

    with pytest.warns(UserWarning, match="is of other values"):
        require_mean(capture_joint(model, loss, batch), batch, more, warns=True)


def models() -> dict[str, tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Return models of transformers, in training, with what they are called with."""
    words = torch.randint(0, 90, (4, 12))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [9], [3]])).long()
    text = {"input_ids": words, "attention_mask": mask}
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    gpt2 = transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4, pad_token_id=99)
    bert = transformers.BertConfig(vocab_size=100, **sizes)
    vit = transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    small: dict[str, Any] = {"d_model": 32, "num_layers": 1, "decoder_start_token_id": 0}
    t5 = transformers.T5Config(vocab_size=100, **small)
    classes = torch.tensor([0, 1, 1, 0])
    return {
        "gpt2": (
            transformers.GPT2LMHeadModel(gpt2),
            {**text, "labels": words.masked_fill(mask == 0, -100)},
        ),
        "gpt2, classes": (
            transformers.GPT2ForSequenceClassification(gpt2),
            {**text, "labels": classes},
        ),
        "bert": (transformers.BertForSequenceClassification(bert), {**text, "labels": classes}),
        "t5": (transformers.T5ForConditionalGeneration(t5), {**text, "labels": words}),
        "vit": (
            transformers.ViTForImageClassification(vit),
            {"pixel_values": torch.randn(4, 3, 16, 16), "labels": classes},
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "gpt2, classes", "bert", "t5", "vit"])
def test_losses_of_transformers_are_proven(name: str) -> None:
    model, batch = models()[name]
    loss = RankLoss(lambda model, batch: model(**batch).loss, 2)

    def more(batch: Any) -> tuple[Any, Joint]:
        wide = with_more_rows(batch)
        return wide, capture_joint(model, loss, wide)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_mean(capture_joint(model, loss, batch), batch, more, warns=True)


def test_counts_are_summed_as_they_are() -> None:
    model, batch = nn.Linear(6, 6), (torch.randn(4, 6), torch.randn(4, 6))
    loss = RankLoss(lambda model, batch: (model(batch[0]).argmax(1) == 0).sum(), 2)
    joint = capture_joint(model, loss, batch, trains=False)
    require_mean(joint, batch, lambda _: pytest.fail("nothing is to be proven"), warns=True)
