"""Cuts into stages against all cuts there are, and the proof that rows keep apart against models that mix them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

from gascompile.passes.parallel.cut_stages import CutProblem, StageOps, StageRank, cut_stages
from gascompile.passes.parallel.legs import Action, Legs, Message, outstanding_bytes
from gascompile.passes.parallel.stage_clock import waits
from gascompile.training.capture.joint import capture_joint
from gascompile.training.pipeline.provable import why_whole
from gascompile.training.pipeline.schedule import orders

_COUNTS = (1, 2, 4)
_SIZES = st.integers(0, 40)


@st.composite
def problems(draw: st.DrawFn) -> CutProblem:
    num_ops, num_ranks = draw(st.integers(3, 8)), draw(st.integers(1, 3))

    def numbers() -> list[int]:
        return draw(st.lists(_SIZES, min_size=num_ops, max_size=num_ops))

    ops = StageOps(
        weight_bytes=numbers(),
        num_weights=numbers(),
        kept_bytes=numbers(),
        least_bytes=numbers(),
        sent_bytes=numbers(),
        num_states=draw(st.integers(1, 3)),
        is_cut=draw(st.lists(st.booleans(), min_size=num_ops, max_size=num_ops)),
        num_calls=numbers(),
    )
    ranks = [
        StageRank(
            times_s=[time / 10 for time in numbers()],
            budget_bytes=draw(st.integers(5, 300)),
            stream_bytes_per_s=draw(st.integers(1, 50)),
            latency_s=draw(st.integers(0, 3)) / 100,
        )
        for _ in range(num_ranks)
    ]
    return CutProblem(
        ops=ops,
        ranks=ranks,
        network_bytes_per_s=10.0,
        latency_s=0.01,
        has_backward=draw(st.booleans()),
    )


def cheapest(problem: CutProblem) -> float | None:
    """Return the seconds of the best of all cuts."""
    num_ops, size, best = len(problem.ops.num_calls), len(problem.ranks), None
    places = [place for place in range(1, num_ops) if problem.ops.is_cut[place]]
    for count in _COUNTS:
        for inner in combinations(places, size - 1):
            ends = [0, *inner, num_ops]
            times = [problem.stage_s(r, ends[r], ends[r + 1], count) for r in range(size)]
            if None in times:
                continue
            known = [time_s for time_s in times if time_s is not None]
            time_s = sum(known) + (count - 1) * max(known)
            best = time_s if best is None else min(best, time_s)
    return best


@given(problems())
def test_none_is_faster(problem: CutProblem) -> None:
    found, wanted = cut_stages(problem, _COUNTS), cheapest(problem)
    assert (found is None) == (wanted is None)
    if found is None:
        return
    assert found.time_s == pytest.approx(wanted)
    ends = [*found.begins, len(problem.ops.num_calls)]
    for rank, time_s in enumerate(found.stage_s):
        own = problem.stage_s(rank, ends[rank], ends[rank + 1], found.num_batches)
        assert own == time_s and own is not None


def test_ranks_wait_for_each_other() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.zeros(25)
    ends = [(0, 1), (1, 2), (2, 3)]
    legs = Legs(
        num_stages=2,
        has_backward=True,
        leg_of={},
        messages=tuple(Message(value=node, source=a, target=b) for a, b in ends if a != 1),
    )
    found = waits(
        legs, orders(2, 2, has_backward=True), [1.0, 2.0, 3.0, 1.0], lambda size: size / 100
    )
    # The first rank sends at 1 and 2. The last is at work from 2, a transfer later, to 12, and sends at 7 and 12.
    assert found.before_s[Action(leg=1, batch=0)] == 2.0
    assert found.before_s[Action(leg=3, batch=0)] == 6.0
    assert found.before_s[Action(leg=3, batch=1)] == 4.0
    assert found.ends_s == (14.0, 12.0)
    assert outstanding_bytes(legs, orders(2, 2, has_backward=True), 0) == 200
    assert outstanding_bytes(legs, orders(2, 8, has_backward=True), 0) == 200
    assert outstanding_bytes(legs, orders(2, 8, has_backward=True), 1) == 200


def test_a_rank_that_is_slower_gets_less() -> None:
    ops = StageOps(
        weight_bytes=[0] * 8, num_weights=[0] * 8, kept_bytes=[0] * 8, least_bytes=[0] * 8,
        sent_bytes=[0] * 8, num_states=3,
        is_cut=[True] * 8, num_calls=[0] * 8,
    )  # fmt: skip
    ranks = [
        StageRank(times_s=[slow] * 8, budget_bytes=1, stream_bytes_per_s=1.0, latency_s=0.0)
        for slow in (1.0, 3.0)
    ]
    problem = CutProblem(ops=ops, ranks=ranks, network_bytes_per_s=1.0, latency_s=0.0)
    found = cut_stages(problem, [8])
    assert found is not None
    assert found.begins == (0, 6)
    # 6 + 6 / 8 seconds of the first micro-batch's way, and seven more of the slower of two equal stages.
    assert found.time_s == pytest.approx(0.75 + 0.75 + 7 * 0.75)
    assert found.alone_share == pytest.approx(1 / 9)


_APART: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "mean": lambda m, x: m(x).square().mean(),
    "softmax": lambda m, x: m(x).softmax(1).log().mean(),
    "flat": lambda m, x: functional.cross_entropy(m(x).view(12, 2), torch.zeros_like(x).long().view(12, 2)[:, 0]),
    "attention": lambda m, x: functional.scaled_dot_product_attention(*[m(x).view(6, 1, 2, 2)] * 3).mean(),
    "normed": lambda m, x: functional.layer_norm(m(x), (4,)).mul(x).mean(),
    "pooled": lambda m, x: functional.max_pool2d(m(x).view(6, 1, 2, 2), 2).square().mean(),
    "joined": lambda m, x: torch.cat([m(x), x], 1).transpose(0, 1).sum(0).mean(),
}  # fmt: skip
_MIXED: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "centred": lambda m, x: (m(x) - m(x).mean(0)).square().mean(),
    "compared": lambda m, x: (m(x) @ m(x).T).softmax(1).mean(),
    "numbered": lambda m, x: (m(x) * torch.arange(6.0)[:, None]).mean(),
    "beside numbers": lambda m, x: (
        torch.cat([m(x), torch.arange(6.0)[:, None]], 1).softmax(1).square().mean()
    ),
    "on top of numbers": lambda m, x: (
        torch.addmm(torch.arange(24.0).view(6, 4), m(x), torch.ones(4, 4)).square().mean()
    ),
    "with a matrix each": lambda m, x: (
        (m(x)[:, None] @ torch.arange(96.0).view(6, 4, 4)).square().mean()
    ),
    "below a diagonal": lambda m, x: m(x).tril().square().mean(),
    "summed up": lambda m, x: m(x).cumsum(0).square().mean(),
    "some": lambda m, x: m(x)[:3].mean(),
    "turned": lambda m, x: (m(x).flip(0) * x).mean(),
    "across": lambda m, x: m(x).view(3, 8).softmax(1).square().mean(),
}


@pytest.mark.parametrize("name", _APART)
def test_rows_that_keep_apart(name: str) -> None:
    assert _why_whole(_APART[name]) == ""
    _require_apart(_APART[name], is_apart=True)


@pytest.mark.parametrize("name", _MIXED)
def test_rows_that_are_mixed(name: str) -> None:
    assert "rows may know of each other" in _why_whole(_MIXED[name])
    _require_apart(_MIXED[name], is_apart=False)


def test_a_sum_is_no_mean() -> None:
    assert "no mean over rows" in _why_whole(lambda m, x: m(x).square().sum())


def _why_whole(loss: Any) -> str:
    return why_whole(capture_joint(nn.Linear(4, 4), loss, torch.randn(6, 4)), 6)


def _require_apart(loss: Any, *, is_apart: bool) -> None:
    """Check by values that the mean of two halves' losses is the whole's, or that it is another."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    whole = loss(model, x)
    try:
        halves = (loss(model, x[:3]) + loss(model, x[3:])) / 2
    except RuntimeError:
        return  # written for six rows
    assert torch.allclose(whole, halves) == is_apart
