"""Following rows: what of a traced loss follows the number of rows beside the rows themselves.

A trace bakes in what Python made of a batch's size, ``len(batch)`` for example, and makes some values as large as the
batch. Two traces of different numbers of rows show it: they are the same but for the sizes of what has rows, and of
what is one value for all of them or random numbers of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.passes.parallel.row_indices import constant_of
from gascompile.passes.parallel.rows import SAME, UNKNOWN, Axis, State, States, name_of
from gascompile.passes.parallel.rows_apart import drawn_alone, uniform_alone
from gascompile.training.capture.means import MEANS, NLL, needed

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint

_SIZES = {
    "_reshape_alias": ("size", "stride"), "_unsafe_view": ("size",), "arange": ("end",), "expand": ("size",),
    "full": ("size",), "native_group_norm": ("N",), "new_full": ("size",), "new_ones": ("size",),
    "new_zeros": ("size",), "ones": ("size",), "rand": ("size",), "randint": ("size",), "randn": ("size",),
    "reshape": ("shape",), "view": ("size",), "zeros": ("size",),
}  # fmt: skip
"""Arguments of ops that are sizes of their operand or result."""


@dataclass(frozen=True, slots=True)
class RowsTraced:
    """What a trace over some rows computes."""

    joint: Joint
    rows: int
    roots: Sequence[fx.Node]
    """What is looked at, with all that it is made of."""
    ends: Collection[fx.Node] = ()
    """What is not looked at, nor what that is made of."""
    apart: Collection[tuple[fx.Node, fx.Node]] = ()
    """Ops with operands of theirs that are not looked at, unless others are of them."""

    def nodes(self) -> list[fx.Node]:
        """Return what the roots are made of, in the order of the graph, up to sums over all ranks."""
        behind = needed(
            self.roots,
            lambda node: node in self.ends or _is_of_ranks(node),
            lambda node: [of for of in node.all_input_nodes if (node, of) not in self.apart],
        )
        return [node for node in self.joint.graph_module.graph.nodes if node in behind]

    def numbers(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Return numbers that tell ``nodes`` and ends apart, the same ones in two traces of the same ops."""
        ends = [node for node in self.joint.graph_module.graph.nodes if node in self.ends]
        return {node: number for number, node in enumerate([*ends, *nodes])}


def following_rows(
    one: RowsTraced,
    other: RowsTraced,
    places: Mapping[fx.Node, States],
    scaling: Collection[fx.Node] = (),
) -> tuple[fx.Node, str] | None:
    """Return the first op that follows the number of rows, and how; ``None`` where nothing but rows does.

    Args:
        one: what is asked about.
        other: the same over another number of rows.
        places: where rows are in ``one``, as ``rows_apart`` says.
        scaling: ops whose numbers may follow it.
    """
    graph, nodes, others = one.joint.graph_module.graph, one.nodes(), other.nodes()
    looked_up = _by_own_number(graph, places)
    free = drawn_alone(graph) | uniform_alone(graph) | needed(list(looked_up.values()))
    first, second = one.numbers(nodes), other.numbers(others)
    if {first.get(root) for root in one.roots} != {second.get(root) for root in other.roots}:
        return one.joint.loss, "is of other values for another number of rows"
    looked_at = {*nodes}
    for node, its in itertools.zip_longest(nodes, others):
        if node is None or its is None or _kind(node, one.joint) != _kind(its, other.joint):
            return node or its, "is another op for another number of rows"
        if [first.get(a) for a in _operands(node)] != [second.get(a) for a in _operands(its)]:
            return node, "is of other values for another number of rows"
        states = places.get(node, SAME)
        has_rows = any(isinstance(state, Axis) for state in pytree.tree_leaves(states))
        numbers = (_numbers(n, is_sized=has_rows or node in free) for n in (node, its))
        is_same = node in scaling or len({repr(of) for of in numbers}) == 1
        is_free = node in free and all(
            _keeps_rows(u, places, free) for u in node.users if u in looked_at
        )
        if not is_same or not (is_free or _has_same_sizes(node, its, states, one.rows, other.rows)):
            return node, "follows the number of rows"
        if node in looked_up and not _is_own_row(its, other.rows):
            return node, "looks up other rows for another number of them"
        if not _is_same_value(one.joint.outside.get(node.name), other.joint.outside.get(its.name)):
            return node, "follows the number of rows"
    return None


def _by_own_number(graph: fx.Graph, places: Mapping[fx.Node, States]) -> dict[fx.Node, fx.Node]:
    """Return what looks up for each row what that has of a tensor, with the index that is the row's own number."""
    looked_up = [node for node in graph.nodes if name_of(node.target) == "index"]
    first: list[Any] = [_operands(node)[1] for node in looked_up]
    pairs = zip(looked_up, first, strict=True)
    return {
        n: index for n, index in pairs if isinstance(places.get(n), Axis) and n.args[1][0] is index
    }


def _is_own_row(node: fx.Node, rows: int) -> bool:
    numbers = constant_of(_operands(node)[1])
    return numbers is not None and torch.equal(numbers.flatten(), torch.arange(rows))


def _is_of_ranks(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "gascompile_ranks"


def _kind(node: fx.Node, joint: Joint) -> str:
    """Return which op a node is, or what it stands for."""
    if node.op != "placeholder":
        return str(node.target)
    if node.name in joint.inputs:
        return f"input {joint.inputs.index(node.name)}"
    return joint.bound.get(node.name, "outside")


def _operands(node: fx.Node) -> list[fx.Node]:
    leaves = pytree.tree_leaves([node.args, node.kwargs])
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _numbers(node: fx.Node, *, is_sized: bool) -> list[Any]:
    """Return the arguments of an op that are no tensors, without sizes where these may be others."""
    given: dict[str, Any] = dict(node.kwargs)
    names = [str(number) for number in range(len(node.args))]
    if isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
    given |= dict(zip(names, node.args, strict=False))
    for name in _SIZES.get(name_of(node.target), ()) if is_sized else ():
        given.pop(name, None)
    leaves = pytree.tree_leaves(given) if node.op != "placeholder" else []
    return [leaf for leaf in leaves if not isinstance(leaf, fx.Node)]


def _keeps_rows(user: fx.Node, places: Mapping[fx.Node, States], free: Collection[fx.Node]) -> bool:
    """Return whether an op gives each row its own part of what is as large as the batch."""
    # A loss has none itself.
    of = [user, *(user.all_input_nodes if user.target in MEANS or user.target in NLL else ())]
    states: list[State] = pytree.tree_leaves([places.get(node) for node in of])
    return user in free or any(isinstance(state, Axis) for state in states)


def _has_same_sizes(node: fx.Node, its: fx.Node, states: States, rows: int, others: int) -> bool:
    values, compared = _values(node), _values(its)
    each = states if isinstance(states, list) else [states] * len(values)
    each += [UNKNOWN] * (len(values) - len(each))
    return len(values) == len(compared) and all(
        _size_of(value, state, rows, others) == _size_of(against, UNKNOWN, rows, others)
        for value, against, state in zip(values, compared, each, strict=False)
    )


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _size_of(value: Any, state: State, rows: int, others: int) -> object:
    """Return a tensor's sizes with so many other rows; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    sizes = list(value.shape)
    if isinstance(state, Axis):
        sizes[state.dim] = sizes[state.dim] // rows * others
    return sizes


def _is_same_value(value: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two tensors are the same, numbers that are none included."""
    if value is None or other is None or value is other:
        return value is other
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    return bool(((value == other) | (value.isnan() & other.isnan())).all())
