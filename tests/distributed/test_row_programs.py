"""Random losses, whole and in parts: what is said to be a mean over rows is one, in eager and by its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.training.capture.joint import Joint, capture_joint
from gascompile.training.capture.rank_loss import RankLoss
from gascompile.training.pipeline.provable import split_rows, what_differs, why_whole
from gascompile.training.planning.rank_means import require_mean
from gascompile.training.planning.row_draws import with_more_rows
from tests.distributed.row_programs import LOSSES, OPS, WIDTH

Batch = list[torch.Tensor]
OTHER_ROWS = 3
PROGRAMS = st.tuples(
    st.lists(st.sampled_from(sorted(OPS)), max_size=3), st.sampled_from(sorted(LOSSES))
)


def loss_of(ops: Sequence[str], loss: str) -> Callable[[nn.Module, Batch], torch.Tensor]:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        x, y = model(batch[0]), batch[1]
        for name in ops:
            x = OPS[name](x, y)
        return LOSSES[loss](x, y)

    return loss_fn


def batch_of(rows: int) -> Batch:
    return [torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)]


def parts_are_whole(loss_fn: Any, model: nn.Module, parts: list[Batch]) -> bool:
    """Return whether eager's loss and gradients of all rows are the means of the parts', by their rows."""
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    rows = [len(part[0]) / len(whole[0]) for part in parts]
    losses = (
        loss_fn(model, whole),
        torch.stack([loss_fn(model, p) * n for p, n in zip(parts, rows, strict=True)]).sum(),
    )
    weights = list(model.parameters())
    one, other = (
        [loss, *torch.autograd.grad(loss, weights, materialize_grads=True)] for loss in losses
    )
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)


def is_proven_for_ranks(loss_fn: Any, model: nn.Module, batch: Batch) -> bool:
    loss = RankLoss(loss_fn, 2)

    def more(batch: Batch) -> tuple[Batch, Joint]:
        wide = with_more_rows(batch)
        return wide, capture_joint(model, loss, wide)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            require_mean(capture_joint(model, loss, batch), batch, more, warns=True)
        except UnsupportedOpError:
            return False
    return not any("ranks weigh the loss" in str(warning.message) for warning in said)


def is_proven_for_parts(loss_fn: Any, model: nn.Module, batch: Batch, count: int) -> bool:
    joint, rows = capture_joint(model, loss_fn, batch), len(batch[0])
    if why_whole(joint, rows):
        return False
    try:
        small = capture_joint(model, loss_fn, split_rows(batch, count)[0])
    except CaptureError:
        return False
    return not what_differs(joint, small, rows, count)


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, st.sampled_from((4, 6)))
def test_what_is_proven_is_so(program: tuple[list[str], str], rows: int) -> None:
    torch.manual_seed(rows)
    loss_fn, model, batch = loss_of(*program), nn.Linear(WIDTH, WIDTH), batch_of(rows)
    try:
        loss_fn(model, batch)
        is_proven = is_proven_for_ranks(loss_fn, model, batch)
    except (CaptureError, IndexError, RuntimeError):
        return  # Eager has no such loss of so many rows.
    if is_proven:
        assert parts_are_whole(loss_fn, model, [batch, batch_of(OTHER_ROWS)])
    for count in (2, rows):
        if is_proven_for_parts(loss_fn, model, batch, count):
            parts = [list(part) for part in zip(*(x.chunk(count) for x in batch), strict=True)]
            assert parts_are_whole(loss_fn, model, parts)


def test_plain_losses_are_proven() -> None:
    """What the property says would hold if nothing were proven, too."""
    for name in ("tanh", "group norm", "own classes", "a token", "in parts", "turned twice"):
        loss_fn, model, batch = loss_of([name], "squares"), nn.Linear(WIDTH, WIDTH), batch_of(4)
        assert is_proven_for_ranks(loss_fn, model, batch), name
        assert is_proven_for_parts(loss_fn, model, batch, 2), name
