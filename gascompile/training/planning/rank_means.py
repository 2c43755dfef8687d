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
from gascompile.distributed.rows import num_rows
from gascompile.passes.parallel.row_indices import constant_of
from gascompile.passes.parallel.rows import (
    SAME,
    UNKNOWN,
    Axis,
    argument_of,
    name_of,
    shape_of,
)
from gascompile.passes.parallel.rows_apart import rows_apart, uniform_alone
from gascompile.training.capture.counted_losses import counted_mean
from gascompile.training.capture.following_rows import RowsTraced, following_rows
from gascompile.training.capture.means import (
    MEANS,
    NLL,
    SUM,
    is_a_mean,
    is_row_by_row,
    needed,
    of_batch,
    own_backward,
    reduction_of,
)

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint

_LINEAR = frozenset(
    {
        "_to_copy", "add", "alias", "cat", "clone", "detach", "expand", "mean", "neg", "reshape", "rsub", "select",
        "slice", "split", "squeeze", "stack", "sub", "sum", "unbind", "unsqueeze", "view",
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
    joint: Joint,
    batch: Any,
    more: Callable[[Any], tuple[Any, Joint]],
    *,
    warns: bool,
    counts_ignored: bool = False,
) -> None:
    """Refuse a loss that is no mean over rows, and warn of one of which that is not known.

    Args:
        joint: of this rank's rows, as traced.
        batch: these.
        more: returns a batch of more rows, and its trace.
        warns: of several ranks one is enough.
        counts_ignored: targets that losses ignore are counted as steps run, so that these may.

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
        doubts = _doubts(joint, batch, sizes.pop(), more, counts_ignored) if not why else []
    except (CaptureError, UnsupportedOpError) as error:
        why = f"a batch of more rows cannot be traced ({error})"
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
    joint: Joint,
    batch: Any,
    rows: int,
    more: Callable[[Any], tuple[Any, Joint]],
    counts_ignored: bool,
) -> list[_Doubt]:
    if rows == 1:  # of one row nobody could say which dimension it is
        batch, joint = more(batch)
        rows = num_rows(batch)
    own = _Proof(joint, rows, counts_ignored)
    own.look([(joint.loss, 1.0)])
    if why := own_backward(joint):
        own.doubts.append(_Doubt(joint.loss, f"may have other gradients: {why}"))
    if own.sums or not own.doubts:
        wide, its = more(batch)
        other = _Proof(its, num_rows(wide), counts_ignored)
        other.look([(its.loss, 1.0)])
        own.compare(other)
    return own.doubts


class _Proof:
    """What is found on the way back from a loss to means over rows."""

    def __init__(self, joint: Joint, rows: int, counts_ignored: bool) -> None:
        self.joint, self._rows, self._counts_ignored = joint, rows, counts_ignored
        self.doubts: list[_Doubt] = []
        self.means: list[tuple[fx.Node, float]] = []
        self.sums: list[tuple[fx.Node, float]] = []
        """Over rows, and by what each is multiplied."""
        self.others: list[tuple[fx.Node, float]] = []
        """Ops that add what is not of the batch, and by what each is multiplied."""
        self.sources: list[fx.Node] = []
        """What these are over."""
        self._factors: set[tuple[fx.Node, fx.Node]] = set()
        """Ops that multiply means and sums, and by what, as far as that is known."""
        self._scaling: set[fx.Node] = set()
        """Of these the ones whose numbers are known."""
        self._dependent = of_batch(joint, rows)
        graph = joint.graph_module.graph
        batch = [n for n in graph.nodes if n.name in joint.inputs and shape_of(n)]
        self._places = rows_apart(graph, batch, rows, draws_by_rows=True)
        self._uniform = uniform_alone(graph)
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
            # How many of all targets are its own, and whether there are any, is known at each step.
            some, share = node.all_input_nodes
            self._factors |= {(node, share), (some, some.all_input_nodes[0])}
            # Those that are ops of the model are behind the last.
            if self._require_apart(node, max(losses)):
                self.means.append((node, factor))
        elif reduction_of(node) is not None:
            self._look_at_loss(node, factor)
        elif isinstance(self._places.get(given[0]), Axis):
            self._look_at_rows(node, name, given, factor)
        elif _is_linear(node, name):
            if any(self._is_another(operand) for operand in _summands(node, name)):
                self.others.append((node, factor))
            return [(source, factor) for source in given]
        elif _is_multiplied(node) and self._is_of_batch(node.args) == [True, False]:
            return [(given[0], self._scaled(node, factor, node.args[1], divides=name == "div"))]
        elif name == "mul" and self._is_of_batch(node.args) == [False, True]:
            return [(given[0], self._scaled(node, factor, node.args[0], divides=False))]
        elif name in _CURVED and node.meta["val"].numel() == 1:
            num_doubts = len(self.doubts)
            self.look([(source, factor) for source in given])
            if num_doubts == len(self.doubts):
                is_certain = node in of_batch(self.joint)
                self.doubts.append(_Doubt(node, "of a mean is none", is_certain))
        else:
            why = "divides by what depends on the batch" if name == "div" else "is no mean"
            self.doubts.append(_Doubt(node, f"{why} as far as its graph shows"))
        return []

    def _is_another(self, operand: Any) -> bool:
        """Return whether an operand is not of the batch, but for a 0 as ``sum`` of Python's begins with."""
        is_zero = isinstance(operand, (int, float)) and not operand
        return not is_zero and operand not in self._dependent

    def _is_of_batch(self, operands: Sequence[Any]) -> list[bool]:
        return [isinstance(a, fx.Node) and a in self._dependent for a in operands]

    def _scaled(self, node: fx.Node, factor: float, by: Any, *, divides: bool) -> float:
        """Return a factor times a number that an op multiplies by, where that is known; else as it is.

        What a step reads anew is not known, and the same for any number of rows.
        """
        number = self._number(by) if isinstance(by, fx.Node) else float(by)
        if number is None:
            return factor
        self._scaling.add(node)
        self._factors |= {(node, by)} if isinstance(by, fx.Node) else set()
        return factor / number if divides and number else factor * number

    def _number(self, node: fx.Node) -> float | None:
        """Return what is computed from numbers of the trace alone, ``None`` for anything else."""
        value = constant_of(node, self._constants)
        return float(value) if value is not None and value.numel() == 1 else None

    def _look_at_loss(self, node: fx.Node, factor: float) -> None:
        """Look at one of torch's losses."""
        loss = node if node.target in MEANS else node.all_input_nodes[0]
        if reduction_of(node) == SUM and self._require_apart(node, loss):
            self.sums.append((node, factor))
        elif is_a_mean(node) and (node is loss or self._counts_ignored):
            if self._require_apart(node, loss):
                self.means.append((node, factor))
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
            is_apart = self._require_apart(node, node)
            if is_apart and name == "mean":
                self.means.append((node, factor))
            if not is_apart or name == "mean":
                return
        if is_apart and name == "sum":
            self.sums.append((node, factor))
        elif is_apart:
            self.doubts.append(_Doubt(node, "is not one of its rows'", is_certain=True))
        else:
            self.doubts.append(_Doubt(node, "is no mean as far as its graph shows"))

    def _require_apart(self, node: fx.Node, op: fx.Node) -> bool:
        """Return whether rows know nothing of each other in what an op is over, of which ``node`` is the mean."""
        places, sources = self._places, op.all_input_nodes
        behind = [
            n
            for n in needed(sources, lambda n: places.get(n) is SAME)
            if UNKNOWN in pytree.tree_leaves(places.get(n))
        ]
        if behind or not is_row_by_row(op, places, self._uniform):
            self.doubts.append(_Doubt(min(behind, default=node), "may let rows know of each other"))
            return False
        self.sources += sources
        return True

    def compare(self, other: _Proof) -> None:
        """Compare with what is found for more rows, where nothing but rows may follow their number.

        Factors of means are the same, those of sums are divided by the rows.
        """
        for follows in (self._follows(other, whole=False), self._follows(other, whole=True)):
            if follows is not None:
                self.doubts.append(_Doubt(*follows))
                return
        own, its = (
            [n.target for n, _ in (*of.means, *of.sums, *of.others)] for of in (self, other)
        )
        if own != its:
            self.doubts.append(_Doubt(self.joint.loss, "is made of other ops for more rows"))
            return
        for (node, factor), (_, wide) in zip(self.means, other.means, strict=True):
            if not math.isclose(factor, wide, rel_tol=_ROUNDING):
                why = "is multiplied by what follows the number of rows"
                self.doubts.append(_Doubt(node, why, is_certain=True))
        for (node, factor), (_, wide) in zip(self.others, other.others, strict=True):
            if not math.isclose(factor, wide, rel_tol=_ROUNDING):
                why = "adds what is not of the batch, and is multiplied by what follows the number of rows"
                self.doubts.append(_Doubt(node, why, is_certain=True))
        for (node, factor), (_, wide) in zip(self.sums, other.sums, strict=True):
            if not factor and not wide:
                continue  # what is there for its gradients of zero
            ratio = wide / factor if factor else 1.0
            if math.isclose(ratio, 1.0, rel_tol=_ROUNDING):
                why = "is a sum over rows, which is divided by none or by a fixed number of them"
                self.doubts.append(_Doubt(node, why, is_certain=True))
            elif not math.isclose(ratio, self._rows / other._rows, rel_tol=_ROUNDING):
                self.doubts.append(_Doubt(node, "is divided by what is not the number of rows"))

    def _follows(self, other: _Proof, *, whole: bool) -> tuple[fx.Node, str] | None:
        """Return what follows the number of rows: of what means are over, or of what they make as a ``whole``."""
        one, its = (
            RowsTraced(of.joint, of._rows, [of.joint.loss], {*of.sources}, of._factors)
            if whole
            else RowsTraced(of.joint, of._rows, of.sources)
            for of in (self, other)
        )
        return following_rows(one, its, self._places, self._scaling if whole else ())


def _is_linear(node: fx.Node, name: str) -> bool:
    """Return whether an op of means makes means of them."""
    if name == "_to_copy":
        value: torch.Tensor = node.meta["val"]
        return value.is_floating_point()
    return name in _LINEAR or node.target is operator.getitem


def _summands(node: fx.Node, name: str) -> Sequence[Any]:
    """Return what an op adds, or puts beside each other."""
    if name in ("add", "rsub", "sub"):
        return node.args[:2]
    return pytree.tree_leaves(node.args[0]) if name in ("cat", "stack") else ()


def _is_multiplied(node: fx.Node) -> bool:
    """Return whether an op multiplies, or divides without rounding."""
    name = name_of(node.target)
    return name == "mul" or (name == "div" and argument_of(node, "rounding_mode") is None)
