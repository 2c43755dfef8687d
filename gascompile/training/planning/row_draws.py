"""Row draws: ops that draw random numbers for the rows of a batch, where ranks have parts of it.

What one process draws for all rows, in one op, is what each rank draws for its own. Where the rows lie in an op's
result is proven by two traces: the rows are followed through one, and in the other, of another number of them,
nothing but their own dimension may have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.capture.batches import map_tensors
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import draws
from gascompile.passes.parallel.rows import (
    FREE,
    SAME,
    UNKNOWN,
    Axis,
    State,
    States,
    is_pointwise,
    name_of,
    row_axes,
    shape_of,
)
from gascompile.runtime.collectives.row_numbers import (
    PIECE,
    Geometry,
    fill,
    place_now,
    require_in_pieces,
)
from gascompile.runtime.devices.graph_rules import is_without_chance

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint

NAMESPACE = "gascompile_rows"
_EXACT = 1 << 53
"""Beyond, a float is not every whole number."""
_seeded = (torch.Tag.nondeterministic_seeded,)
_library = torch.library.Library(NAMESPACE, "DEF")
_WHERE = "int[] order, int outer, int rows, int inner, int ranks"
"""The dimensions in the order in which they lie in memory; ``Geometry``; and the number of ranks."""
_library.define(f"dropout(Tensor input, float p, {_WHERE}) -> (Tensor, Tensor)", tags=_seeded)
_library.define(
    "drawn(int[] size, ScalarType dtype, str law, float[] numbers, "
    f"{_WHERE}, *, Device? device=None) -> Tensor",
    tags=_seeded,
)


def _dropout(
    values: torch.Tensor, p: float, order: list[int], outer: int, rows: int, inner: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.empty_like(values)
    _fill(noise, "bernoulli", [1 - p], (order, outer, rows, inner, ranks))
    mask = noise.bool()
    return noise.div_(1 - p).mul_(values), mask


def _drawn(
    size: list[int],
    dtype: torch.dtype,
    law: str,
    numbers: list[float],
    *where: Any,
    device: torch.device | None = None,
) -> torch.Tensor:
    numbers_drawn = torch.empty(size, dtype=dtype, device=device)
    if numbers_drawn.device.type == "cpu":
        _fill(numbers_drawn, law, numbers, where)
    return numbers_drawn


def _fill(values: torch.Tensor, law: str, numbers: Sequence[float], where: Any) -> None:
    order, outer, rows, inner, ranks = where
    lies = Geometry(outer=outer, rows=rows, inner=inner)
    fill(values.permute(order).view(-1), law, numbers, lies, place_now(rows, ranks))


def _described(values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


_library.impl("dropout", _dropout, "CPU")
_library.impl("dropout", _described, "Meta")
_library.impl("drawn", _drawn, "CompositeExplicitAutograd")
dropout = torch.ops.gascompile_rows.dropout.default
drawn = torch.ops.gascompile_rows.drawn.default


class _Law(NamedTuple):
    name: str
    numbers: list[float]
    dtype: torch.dtype


def workspace_bytes(target: object, args: Sequence[Any]) -> int:
    """Return what an op of this file allocates beside its results, from layouts alone."""
    dtype = args[0].dtype if target is dropout else args[1]
    return (2 * PIECE) * int(dtype.itemsize)


def draws_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the ops that draw random numbers on which something depends."""
    return [node for node in graph.nodes if draws(node.target) and not _is_idle(node)]


def _is_idle(node: fx.Node) -> bool:
    """Return whether an op is told not to draw, as attention without dropout is, or a dropout to drop all."""
    is_dropout = name_of(node.target) == "native_dropout"
    return is_without_chance(node) or (is_dropout and node.args[1] in (1, 1.0))


def described(graph: fx.Graph) -> list[object]:
    """Return what all ranks draw alike, in their order: ops, numbers and sizes, without the number of own rows."""
    described_draws: list[object] = []
    for node in draws_of(graph):
        if node.target is dropout:
            _, p, _, outer, _, inner, _ = node.args
            described_draws.append(["dropout", p, outer, inner])
        elif node.target is drawn:
            _, dtype, law, numbers, _, outer, _, inner, _ = node.args
            described_draws.append([law, str(dtype), numbers, outer, inner])
        else:
            given = pytree.tree_leaves((node.args, node.kwargs))
            described_draws.append(
                [str(node.target), [repr(x) for x in given if not isinstance(x, fx.Node)]]
            )
    return described_draws


def laws_of(graph: fx.Graph) -> list[list[object]]:
    """Return by which laws ops draw, such as dropout by its rate, whatever the rows and their sizes are."""
    laws: set[tuple[str, tuple[float, ...]]] = set()
    for node in draws_of(graph):
        if node.target is dropout:
            laws.add(("dropout", (float(node.args[1]),)))  # type: ignore[arg-type]
        elif node.target is drawn:
            law: Any = node.args[2:4]
            laws.add((law[0], tuple(law[1])))
    return [[name, list(numbers)] for name, numbers in sorted(laws)]


def with_more_rows(batch: Any) -> Any:
    """Return a batch with twice its rows and the last one once more: neither a multiple nor a neighbour."""
    return map_tensors(lambda x: torch.cat([x, x, x[-1:]]) if x.dim() and len(x) else x, batch)


def draw_by_rows(joint: Joint, more: Joint, ranks: int) -> None:
    """Let ops of ``joint`` draw what one process draws for the rows of all ranks.

    Args:
        joint: of this rank's rows.
        more: of more rows; see ``with_more_rows``.
        ranks: their number.

    Raises:
        UnsupportedOpError: it is not known for which rows an op draws, or how to draw for some of them alone.
    """
    graph = joint.graph_module.graph
    own, others = draws_of(graph), draws_of(more.graph_module.graph)
    if [node.target for node in own] != [node.target for node in others]:
        raise UnsupportedOpError(
            "other ops draw random numbers for more rows, so that what one process would draw is not known; let "
            "what is drawn not depend on the number of rows, or train in one process"
        )
    wide = {node.name: node for node in more.graph_module.graph.nodes}
    batch = {wide[name]: shape[0] for name in more.inputs if (shape := shape_of(wide[name]))}
    rows = next(iter(batch.values()), 0)
    num_own = (rows - 1) // 2
    axes = _axes(list(zip(own, others, strict=True)), more, batch, rows)
    for node, other in zip(own, others, strict=True):
        axis, before, after = axes[other], shape_of(node), shape_of(other)
        if axis is SAME and before == after:
            continue  # Generators are in the same state on all ranks: so are the numbers.
        is_equal = set(batch.values()) == {rows}
        if (
            not isinstance(axis, Axis)
            or not is_equal
            or not _only_rows(before, after, axis, num_own)
        ):
            raise UnsupportedOpError(
                f"op '{node.name}' ({node.target}) draws random numbers of shape {before}, and it is not known "
                "which of them are for which row, so that ranks would not draw what one process does: draw in the "
                "shape of a tensor whose first dimension has the rows, or train in one process"
            )
        _replace(graph, node, other, axis, num_own, ranks)


def _axes(
    drawn: Sequence[tuple[fx.Node, fx.Node]], more: Joint, batch: Collection[fx.Node], rows: int
) -> dict[fx.Node, State]:
    """Return for which rows ops draw, given as pairs of a node and that of more rows, by the latter.

    An op whose shape alone may follow the batch draws for the rows that it is combined with.
    """
    graph = more.graph_module.graph
    known = row_axes(graph, batch, rows, {})
    axes: dict[fx.Node, State] = {}
    supposed: dict[fx.Node, State] = {}
    for node, other in drawn:
        operand = next(iter(other.all_input_nodes), None)
        state = known[operand] if operand is not None else FREE
        axes[other] = state if not isinstance(state, list) else UNKNOWN
        before, after = shape_of(node), shape_of(other)
        if axes[other] is FREE and before == after:
            axes[other] = SAME
        elif axes[other] is FREE and len(before) == len(after):
            dims = [dim for dim, size in enumerate(after) if size != before[dim]]
            axes[other] = UNKNOWN
            if len(dims) == 1 and after[dims[0]] == rows:
                supposed[other] = Axis(dims[0])
    if supposed:
        alone = row_axes(graph, (), rows, supposed)
        both = row_axes(graph, batch, rows, supposed)
        for node, axis in supposed.items():
            is_met = _is_met(node, known, alone, both, more.loss)
            axes[node] = axis if is_met else UNKNOWN
    return axes


def _is_met(
    node: fx.Node,
    batch: Mapping[fx.Node, States],
    alone: Mapping[fx.Node, States],
    both: Mapping[fx.Node, States],
    loss: fx.Node,
) -> bool:
    """Return whether what is made of a draw is combined with rows of the batch, each with its own.

    Args:
        node: the draw.
        batch: what is known from the batch.
        alone: what would be from draws, if they draw for rows.
        both: what would be from both.
        loss: what comes after it is made in the backward pass, and follows.
    """
    made, is_met, left = {node}, False, [node]
    while left:
        for user in left.pop().users:
            if user not in made and user.op == "call_function" and not loss < user:
                made.add(user)
                left.append(user)
    for user in made - {node}:
        sources = user.all_input_nodes
        ours = [alone[s] for s in sources if s in made]
        if any(s not in made and isinstance(batch[s], Axis) for s in sources):
            if not all(isinstance(state, Axis) for state in ours):
                return False
            if is_pointwise(user.target):
                if not isinstance(both[user], Axis):
                    return False
                is_met = True
    return is_met


def _only_rows(before: Sequence[int], after: Sequence[int], axis: Axis, num_own: int) -> bool:
    """Return whether more rows change nothing of a shape but the dimension of the rows."""
    each, wanted = axis.repeat * axis.above, list(after)
    wanted[axis.dim] = each * num_own
    return after[axis.dim] == each * (2 * num_own + 1) and list(before) == wanted


def _law_of(node: fx.Node) -> _Law | None:
    """Return what an op draws, where that can be drawn for some rows alone."""
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        return None
    args, dtype = list(node.args), value.dtype
    given = [arg for arg in args if isinstance(arg, (int, float))]
    laws: dict[str, tuple[str, list[float]]] = {
        "bernoulli": ("bernoulli", given),
        "rand": ("uniform", [0.0, 1.0]),
        "rand_like": ("uniform", [0.0, 1.0]),
        "uniform": ("uniform", given or [0.0, 1.0]),
        "randn": ("normal", [0.0, 1.0]),
        "randn_like": ("normal", [0.0, 1.0]),
        "normal_functional": ("normal", given or [0.0, 1.0]),
        "exponential": ("exponential", given or [1.0]),
        "randint": ("integers", given if len(given) == 2 else [0, *given]),
        "randint_like": ("integers", given if len(given) == 2 else [0, *given]),
    }
    law, numbers = laws.get(name_of(node.target), ("", []))
    num_numbers = {"exponential": 1, "bernoulli": 1}.get(law, 2)
    is_plain = value.is_contiguous() and all(abs(number) < _EXACT for number in numbers)
    if not law or len(numbers) != num_numbers or not is_plain:
        return None
    return _Law(law, [float(number) for number in numbers], dtype)


def _replace(
    graph: fx.Graph, node: fx.Node, other: fx.Node, axis: Axis, rows: int, ranks: int
) -> None:
    """Let an op draw by rows.

    Raises:
        UnsupportedOpError: it draws all at once.
    """
    wide = next(v for v in pytree.tree_leaves(other.meta["val"]) if isinstance(v, torch.Tensor))
    is_dropout = node.target is torch.ops.gascompile_dropout.native_dropout.default
    law = _Law("bernoulli", [], wide.dtype) if is_dropout else _law_of(node)
    # Torch draws in the order in which elements lie in memory.
    order = sorted(range(wide.dim()), key=lambda dim: (-wide.stride()[dim], dim))
    if wide.is_contiguous():
        order = list(range(wide.dim()))
    if law is None or not wide.permute(order).is_contiguous():
        raise UnsupportedOpError(
            f"op '{node.name}' ({node.target}) draws random numbers that cannot be drawn for some rows alone; draw by "
            "torch.rand, torch.randn, torch.bernoulli with a number or dropout, or train in one process"
        )
    require_in_pieces(law.name, law.dtype)
    shape, at = [shape_of(other)[dim] for dim in order], order.index(axis.dim)
    outer = axis.above
    for size in shape[:at]:
        outer *= size
    inner = axis.repeat
    for size in shape[at + 1 :]:
        inner *= size
    where = (order, outer, rows, inner, ranks)
    if is_dropout:
        node.target = dropout
        node.args = (node.args[0], node.args[1], *where)
        return
    node.target = drawn
    node.args = (shape_of(node), law.dtype, law.name, law.numbers, *where)
    node.kwargs = {}
