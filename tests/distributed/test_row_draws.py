"""Random numbers that follow the rows of a global batch, against what one process draws for all of it at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from gascompile.core.errors import RankError, UnsupportedOpError
from gascompile.runtime.collectives import row_numbers
from gascompile.runtime.collectives.row_numbers import LAWS, Geometry, RowPlace, fill, placed
from gascompile.training.capture.joint import capture_joint
from gascompile.training.capture.rank_loss import RankLoss
from gascompile.training.planning import row_draws
from gascompile.training.planning.row_draws import draw_by_rows, with_more_rows
from tests.distributed.jobs import Dropping

NUMBERS: dict[str, list[float]] = {
    "bernoulli": [0.3],
    "uniform": [-1.0, 2.0],
    "normal": [0.5, 2.0],
    "exponential": [1.5],
    "integers": [3, 1000],
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("outer", "inner"), [(1, 7), (1, 40), (3, 5), (40, 1)])
def test_parts_are_those_of_the_whole(
    law: str, outer: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_numbers, "PIECE", 32)
    dtype = torch.int64 if law == "integers" else torch.float32
    rows = [3, 1, 5, 2]
    torch.manual_seed(5)
    whole = torch.empty(outer, sum(rows), inner, dtype=dtype)
    LAWS[law](whole, NUMBERS[law])
    after = torch.get_rng_state()
    for rank, count in enumerate(rows):
        first = sum(rows[:rank])
        own = torch.empty(outer, count, inner, dtype=dtype)
        torch.manual_seed(5)
        lies = Geometry(outer=outer, rows=count, inner=inner)
        fill(own.view(-1), law, NUMBERS[law], lies, RowPlace(first=first, total=sum(rows)))
        assert torch.equal(own, whole[:, first : first + count])
        assert torch.equal(torch.get_rng_state(), after)


def test_rows_beyond_the_batch_are_refused() -> None:
    with pytest.raises(RankError, match="rows 3 to 5 of a global batch of 4"):
        fill(
            torch.empty(2),
            "uniform",
            [0, 1],
            Geometry(outer=1, rows=2, inner=1),
            RowPlace(first=3, total=4),
        )


def test_a_law_that_is_drawn_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(values: torch.Tensor, _: Any) -> None:
        seed = int(torch.randint(1 << 31, ()))
        values.copy_(torch.rand(len(values), generator=torch.Generator().manual_seed(seed)))

    row_numbers.require_in_pieces.cache_clear()
    monkeypatch.setitem(LAWS, "bernoulli", at_once)
    with pytest.raises(UnsupportedOpError, match="at once and not one by one"):
        row_numbers.require_in_pieces("bernoulli", torch.float64)
    row_numbers.require_in_pieces.cache_clear()


class Of(nn.Module):
    """A layer, and what a function makes of its result."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(48, 16), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


class Sequences(nn.Module):
    """Layers of torch over sequences, with rows in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.TransformerEncoderLayer(24, 2, 12, dropout=0.2)
        self.then = nn.LSTM(24, 4, 2, dropout=0.3)
        self.last = nn.MultiheadAttention(4, 2, dropout=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 2, 24)
        x, _ = self.then(self.first(x.transpose(0, 1)))
        x, _ = self.last(x, x, x)
        return x.transpose(0, 1).flatten(1)


class Classes(nn.Module):
    """Whose loss takes rows otherwise than element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = functional.dropout1d(self.layer(x)[..., None], 0.5).flatten(1)
        return -functional.cross_entropy(found, x[:, :5].softmax(1), reduction="none")[:, None]


def twice(x: torch.Tensor) -> torch.Tensor:
    """As where two passes of each row are compared."""
    first, second = functional.dropout(torch.cat([x, x]), 0.4).view(2, -1, 16).unbind()
    return first * second


def depth(x: torch.Tensor) -> torch.Tensor:
    keep = torch.rand(len(x), 1) < 0.7
    return torch.where(keep, x, x.new_zeros(())) * torch.randint(1, 9, (len(x),))[:, None]


def all_or_nothing(x: torch.Tensor) -> torch.Tensor:
    """Eager draws nothing where it drops all, and other numbers for each type."""
    x = functional.dropout(x + functional.dropout(x, 1.0), 0.5)
    return x * torch.randint(0, 9, x.shape, dtype=torch.uint8)


def looked_up(x: torch.Tensor) -> torch.Tensor:
    table = functional.dropout(torch.arange(16.0).expand(1, 16), 0.5)
    return functional.dropout2d(x.view(-1, 4, 2, 2), 0.5).flatten(1) + table


def attention(x: torch.Tensor) -> torch.Tensor:
    """Whose op may draw random numbers, and is told not to."""
    heads = x.view(-1, 1, 4, 4)
    found = functional.scaled_dot_product_attention(heads, heads, heads)
    return functional.dropout(found.flatten(1), 0.5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "all kinds": Dropping,
    "sequences": Sequences,
    "twice": lambda: Of(twice),
    "classes": Classes,
    "attention": lambda: Of(attention),
    "depth": lambda: Of(depth),
    "all or nothing": lambda: Of(all_or_nothing),
    "looked up": lambda: Of(looked_up),
}


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    """Weigh each element otherwise, so that a number at another place is another loss."""
    x, weights = batch
    found = model(x)
    loss: torch.Tensor = (found * weights[:, : found.shape[1]]).sum(1).mean()
    return loss


def part_of_the_loss(
    model: nn.Module, batch: Any, first: int, total: int, ranks: int
) -> torch.Tensor:
    """Return a rank's share of the loss, by the graph that its step is made of."""
    loss = RankLoss(loss_fn, ranks)
    joint = capture_joint(model, loss, batch)
    draw_by_rows(joint, capture_joint(model, loss, with_more_rows(batch)), ranks)
    loss.weight.fill_(len(batch[0]) / total)
    values = {**dict(zip(joint.inputs, pytree.tree_leaves(batch), strict=True)), **joint.outside}
    values.update({name: joint.tensors[bound].detach() for name, bound in joint.bound.items()})
    graph = joint.graph_module.graph
    env: dict[fx.Node, Any] = {}
    with placed(RowPlace(first=first, total=total)), torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = values[node.name]
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
    found: torch.Tensor = env[joint.loss]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_parts_sum_to_that_of_one_process(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    x, weights = torch.randn(6, 48), torch.randn(6, 64)
    torch.manual_seed(9)
    wanted, after = loss_fn(model, (x, weights)).detach(), torch.get_rng_state()
    total, first = torch.zeros(()), 0
    for count in (1, 5):
        torch.manual_seed(9)
        own = slice(first, first + count)
        total += part_of_the_loss(model, (x[own], weights[own]), first, 6, 2)
        assert torch.equal(torch.get_rng_state(), after)
        first += count
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-6)


def of_numbers(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5) if len(x) < 5 else x


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned around": lambda x: functional.dropout(x.flip(0), 0.5),
    "the first of a rank": lambda x: functional.dropout(x[:4], 0.5).sum(0, keepdim=True) + x,
    "rows by rows": lambda x: functional.dropout(x @ x.t(), 0.5) @ x,
    "of no row": lambda x: x + torch.rand(3 * len(x)).sum(),
    "by values": lambda x: x * torch.multinomial(x.exp().detach(), 16),
    "turned noise": lambda x: x * torch.rand(len(x), 1).flip(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proven_is_refused(name: str) -> None:
    model, batch = Of(REFUSED[name]), (torch.randn(4, 48), torch.randn(4, 16))
    with pytest.raises(UnsupportedOpError, match="draws random numbers"):
        part_of_the_loss(model, batch, 0, 8, 2)


def test_other_draws_for_another_number_of_rows_are_refused() -> None:
    batch = (torch.randn(4, 48), torch.randn(4, 16))
    with pytest.raises(UnsupportedOpError, match="for more rows"):
        part_of_the_loss(Of(of_numbers), batch, 0, 8, 2)


def test_what_ranks_draw_is_told_without_their_rows() -> None:
    batch = (torch.randn(4, 48), torch.randn(4, 16))
    told = []
    for rows in (2, 4):
        loss, own = RankLoss(loss_fn, 2), [x[:rows] for x in batch]
        model = Of(depth)
        joint = capture_joint(model, loss, own)
        draw_by_rows(joint, capture_joint(model, loss, with_more_rows(own)), 2)
        told.append(row_draws.described(joint.graph_module.graph))
    assert told[0] == told[1]
    assert len(told[0]) == 2
