"""Small updates of a step that keeps everything in memory run in one call at its end, and change the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.capture.batches import leaves_of, plain_structure
from gascompile.runtime.run import straight
from gascompile.runtime.run.late_updates import late_updates
from gascompile.training.step import TrainingStep

RUNS = 5
"""After two of which a schedule is written out."""
_AdamW = partial(torch.optim.AdamW, fused=True)
_SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1, nesterov=True)


class Net(nn.Module):
    """Its last weight is read transposed, and one of its biases is the gradient of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4, bias=False)
        self.shift, self.slope = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        last: torch.Tensor = self.last(h)
        return last @ self.last.weight + (self.shift + self.slope).sum()


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = nn.functional.mse_loss(model(batch), torch.zeros(()).expand(3, 5))
    return found


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have schedules written out however long their steps take under load."""
    monkeypatch.setattr(straight, "_SHORT_STEP_S", float("inf"))


def _groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": [model.first.weight, model.shift], "lr": 0.1},
        {"params": [model.first.bias, model.last.weight, model.slope]},
    ]


def _opened(
    model: Net, make: Callable[..., torch.optim.Optimizer], tmp_path: Path, **options: Any
) -> TrainingStep:
    step: TrainingStep = gascompile.compile_step(
        model,
        _loss,
        make(_groups(model), lr=0.01),
        "64MiB",
        torch.ones(3, 6),
        machine="cpu-nvme",
        cache_dir=tmp_path,
        **options,
    )
    return step


@pytest.mark.parametrize("limit", [None, 0.05])
@pytest.mark.parametrize("make", [_AdamW, torch.optim.Adam, _SGD], ids=["adamw", "adam", "sgd"])
def test_bits_are_those_of_eager(
    make: Callable[..., torch.optim.Optimizer], limit: float | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    theirs = copy.deepcopy(ours := Net())
    # Norms are added up in another order.
    rtol, atol = (0.0, 0.0) if limit is None else (1e-5, 1e-6)
    options = {"fused": True} if make is torch.optim.Adam else {}
    optimizer = make(_groups(theirs), lr=0.01, **options)
    with _opened(ours, partial(make, **options), tmp_path, max_grad_norm=limit) as step:
        for batch in torch.randn(RUNS, 3, 6):
            loss = _loss(theirs, batch)
            loss.backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(theirs.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(step(batch), loss.detach(), rtol=rtol, atol=atol)
        (unit,) = step._units
        late = [s for s in unit.executor._schedule.steps if s.is_late]
        assert len(late) == len(list(theirs.parameters()))
        written = unit.executor._written_out.of(unit.executor._schedule)
        assert written is not None
        # Two lines for each of two groups, behind all others.
        assert [s.is_late for s in written.steps[-5:]] == [False, True, True, True, True]
        assert not any(s.is_late for s in written.steps[:-4])
        graph, budget_bytes = unit.graph_module.graph, unit.plan.budget_bytes["cpu"]
        assert not late_updates(graph, unit.plan, budget_bytes)
    for (name, own), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol, msg=name)


def test_what_is_read_or_changed_later_is_not_late(tmp_path: Path) -> None:
    with _opened(Net(), _AdamW, tmp_path) as step:
        (unit,) = step._units
        graph = unit.graph_module.graph
        updates = [n for n in graph.nodes if "adam" in str(n.target)]
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.ops.aten.neg.default, (updates[0].args[0],))
            view = graph.call_function(torch.ops.aten.view.default, (updates[1].args[1], [-1]))
            graph.call_function(torch.ops.aten.zero_.default, (view,))
        assert late_updates(graph, unit.plan, 0) == set(updates[2:])


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        (torch.ones(2), [1, None, {"b": torch.ones(1), "a": "x"}]),
        {"x": (), "y": [torch.zeros(1), 2.0, True]},
        nn.Parameter(torch.ones(1)),
        torch.Size([1, 2]),
        {3: torch.ones(1)},
    ],
    ids=["tensor", "nested", "dict", "parameter", "named", "numbers"],
)
def test_leaves_of_batches_are_those_of_pytrees(batch: Any) -> None:
    leaves: list[Any] = []
    structure = plain_structure(batch, leaves)
    wanted = torch.utils._pytree.tree_leaves(batch)
    assert list(map(id, leaves_of(batch))) == list(map(id, wanted))
    if structure is not None:
        assert list(map(id, leaves)) == list(map(id, wanted))
    other = [batch, batch]
    assert structure is None or plain_structure(other, []) != structure
