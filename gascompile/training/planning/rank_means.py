"""Rank means: whether a loss is the mean of its rows', so that what ranks weigh by rows is one process's.

A trace proves it, or shows that it is none; of what neither holds nothing is claimed. Cross entropies are weighed by
their targets, however many are ignored.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.passes.parallel.rows import (
    FREE,
    SAME,
    UNKNOWN,
    Axis,
    argument_of,
    name_of,
    shape_of,
)
from gascompile.passes.parallel.rows_apart import rows_apart
from gascompile.training.capture.counted_losses import counted_mean
from gascompile.training.capture.means import (
    MEANS,
    NLL,
    SUM,
    is_a_mean,
    needed,
    of_batch,
    reduction_of,
)

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint

_LINEAR = frozenset(
    {
        "_to_copy", "add", "alias", "cat", "clone", "detach", "expand", "mean", "neg", "reshape", "select", "slice",
        "split", "squeeze", "stack", "sub", "sum", "unbind", "unsqueeze", "view",
    }
)  # fmt: skip
"""Ops of means that are means again."""
_CURVED = frozenset({"exp", "log", "log1p", "log2", "pow", "reciprocal", "rsqrt", "sqrt", "square"})
"""Ops of a mean that are none, as that of two means is not the mean of two."""
_EXTREMES = frozenset(
    {
        "amax", "amin", "linalg_vector_norm", "logsumexp", "max", "median", "min", "prod", "std", "var",
    }
)  # fmt: skip
"""Reductions that are no mean."""
_UNIFORM = frozenset({"full", "ones", "scalar_tensor", "zeros"})
_WRITE = (
    "let loss_fn return a mean over rows, as torch's losses do with reduction='mean' (cross_entropy with class weights "
    "or ignored targets, too), or train in one process"
)
_ROUNDING = 1e-6
"""Of factors that are computed from numbers of rows in float32."""


@dataclass(frozen=True, slots=True)
class _Doubt:
    op: fx.Node
    why: str
    is_certain: bool = False

    def __str__(self) -> str:
        return f"'{self.op.name}' ({self.op.target}) {self.why}"


def require_mean(
    joint: Joint, batch: Any, more: Callable[[Any], tuple[Any, Joint]], *, warns: bool
) -> None:
    """Refuse a loss that is no mean over rows, and warn of one of which that is not known.

    Args:
        joint: of this rank's rows, as traced.
        batch: these.
        more: returns a batch of a row more, and its trace.
        warns: of several ranks one is enough.

    Raises:
        UnsupportedOpError: it is none; names the op.
    """
    if not joint.loss.meta["val"].is_floating_point():
        return
    tensors = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor) and x.dim()]
    sizes = {tensor.shape[0] for tensor in tensors}
    doubts: list[_Doubt] = []
    why = f"tensors of the batch have {sorted(sizes)} rows" if len(sizes) != 1 else ""
    try:
        doubts = _doubts(joint, batch, sizes.pop(), more) if not why else []
    except CaptureError as error:
        why = f"a batch with a row more cannot be traced ({error})"
    certain = next((doubt for doubt in doubts if doubt.is_certain), None)
    if certain is not None:
        raise UnsupportedOpError(
            f"the loss is no mean over rows: {certain}, so that the loss over the rows of all ranks is not the mean "
            f"of theirs; {_WRITE}"
        )
    if warns and (doubts or why):
        _warn(why or str(doubts[0]))


def _warn(why: str) -> None:
    warnings.warn(
        "ranks weigh the loss by their rows, which is one process's loss on all rows where it is a mean over them, and "
        f"that is not known: {why}. If it is none, {_WRITE}",
        stacklevel=2,
    )


def _doubts(
    joint: Joint, batch: Any, rows: int, more: Callable[[Any], tuple[Any, Joint]]
) -> list[_Doubt]:
    if rows == 1:  # of one row nobody could say which dimension it is
        batch, joint = more(batch)
        rows = 2
    own = _Proof(joint, rows)
    own.look([(joint.loss, 1.0)])
    if own.sums:
        other = _Proof(more(batch)[1], rows + 1)
        other.look([(other.joint.loss, 1.0)])
        own.compare(other)
    return own.doubts


class _Proof:
    """What is found on the way back from a loss to means over rows."""

    def __init__(self, joint: Joint, rows: int) -> None:
        self.joint, self._rows = joint, rows
        self.doubts: list[_Doubt] = []
        self.sums: list[tuple[fx.Node, float]] = []
        """Over rows, and by what each is multiplied."""
        self._dependent = of_batch(joint)
        graph = joint.graph_module.graph
        batch = [n for n in graph.nodes if n.name in joint.inputs and shape_of(n)]
        self._places = rows_apart(graph, batch, rows, draws_by_rows=True)
        num_read = len(joint.outside) - joint.num_constants
        self._constants = dict(list(joint.outside.items())[num_read:])

    def look(self, left: list[tuple[fx.Node, float]]) -> None:
        """Look at numbers, each with its factor, and at what they are made of."""
        seen = set(left)
        while left:
            node, factor = left.pop()
            if node in self._dependent:
                found = [item for item in self._looked_at(node, factor) if item not in seen]
                seen.update(found)
                left += found

    def _looked_at(self, node: fx.Node, factor: float) -> list[tuple[fx.Node, float]]:
        """Return what has to be means for a node to be one."""
        if node.op == "placeholder" or isinstance(self._places.get(node), Axis):
            self.doubts.append(_Doubt(node, "is of rows, and no mean over them"))
            return []
        name = name_of(node.target)
        given = [source for source in node.all_input_nodes if source in self._dependent]
        if (counted := counted_mean(node)) is not None:
            losses = [n for n in needed([counted]) if n.target in NLL]
            # Those that are ops of the model are behind the last.
            self._require_apart(node, max(losses).all_input_nodes[:2])
        elif reduction_of(node) is not None:
            self._look_at_loss(node, factor)
        elif isinstance(self._places.get(given[0]), Axis):
            self._look_at_rows(node, name, given, factor)
        elif name in _LINEAR or node.target is operator.getitem:
            return [(source, factor) for source in given]
        elif name in ("mul", "div") and len(given) == 1 and given[0] is node.args[0]:
            by = self._number(node.args[1])
            return [(given[0], factor / by if name == "div" and by else factor * by)]
        elif name == "mul" and len(given) == 1:
            return [(given[0], factor * self._number(node.args[0]))]
        elif name in _CURVED and node.meta["val"].numel() == 1:
            num_doubts, num_sums = len(self.doubts), len(self.sums)
            self.look([(source, factor) for source in given])
            if (num_doubts, num_sums) == (len(self.doubts), len(self.sums)):
                self.doubts.append(_Doubt(node, "of a mean is none", is_certain=True))
        else:
            why = "divides by what depends on the batch" if name == "div" else "is no mean"
            self.doubts.append(_Doubt(node, f"{why} as far as its graph shows"))
        return []

    def _number(self, by: Any) -> float:
        """Return a factor that may follow the number of rows; 1 for what is read anew by each step."""
        if isinstance(by, fx.Node):
            by = self._constants.get(by.name)
            by = by.item() if by is not None and by.numel() == 1 else 1.0
        return float(by)

    def _look_at_loss(self, node: fx.Node, factor: float) -> None:
        """Look at one of torch's losses."""
        loss = node if node.target in MEANS else node.all_input_nodes[0]
        if reduction_of(node) == SUM and self._require_apart(node, loss.all_input_nodes[:2]):
            self.sums.append((node, factor))
        elif is_a_mean(node) and node is loss:
            self._require_apart(node, loss.all_input_nodes)
        elif reduction_of(node) != SUM:
            why = "may ignore targets, which only torch.nn.functional's cross_entropy and nll_loss count"
            self.doubts.append(_Doubt(node, why))

    def _look_at_rows(
        self, node: fx.Node, name: str, given: Sequence[fx.Node], factor: float
    ) -> None:
        """Look at an op of what has rows."""
        axis, is_apart = self._places[given[0]], False
        dims = argument_of(node, "dim") if name in (*_EXTREMES, "mean", "sum") else ()
        dims = [dims] if isinstance(dims, int) else dims
        count = max(len(shape_of(given[0])), 1)
        assert isinstance(axis, Axis), "it has been looked at"
        is_over = dims is None or dims == [] or axis.dim in [dim % count for dim in dims]
        if name in (*_EXTREMES, "mean", "sum") and is_over:
            is_apart = self._require_apart(node, given)
            if not is_apart or name == "mean":
                return
        if is_apart and name == "sum":
            self.sums.append((node, factor))
        elif is_apart:
            self.doubts.append(_Doubt(node, "is not one of its rows'", is_certain=True))
        else:
            self.doubts.append(_Doubt(node, "is no mean as far as its graph shows"))

    def _require_apart(self, node: fx.Node, sources: Sequence[fx.Node]) -> bool:
        """Return whether rows know nothing of each other in what a mean is over."""
        places = self._places
        behind = [
            n
            for n in needed(sources, lambda n: places.get(n) is SAME)
            if UNKNOWN in pytree.tree_leaves(places.get(n))
        ]
        axes = {axis for axis in map(places.get, sources) if isinstance(axis, Axis)}
        is_even = all(
            places.get(n) is not FREE or not shape_of(n) or name_of(n.target) in _UNIFORM
            for n in sources
        )
        if behind or len(axes) != 1 or not is_even:
            self.doubts.append(_Doubt(min(behind, default=node), "may let rows know of each other"))
            return False
        return True

    def compare(self, other: _Proof) -> None:
        """Compare the factors of sums with those for a row more: of means they are divided by the rows."""
        if [n.target for n, _ in self.sums] != [n.target for n, _ in other.sums]:
            self.doubts.append(_Doubt(self.sums[0][0], "is another op for a row more"))
            return
        for (node, factor), (_, wide) in zip(self.sums, other.sums, strict=True):
            ratio = wide / factor if factor else 1.0
            if math.isclose(ratio, 1.0, rel_tol=_ROUNDING):
                why = "is a sum over rows, which is divided by none or by a fixed number of them"
                self.doubts.append(_Doubt(node, why, is_certain=True))
            elif not math.isclose(ratio, self._rows / other._rows, rel_tol=_ROUNDING):
                self.doubts.append(_Doubt(node, "is divided by what is not the number of rows"))
