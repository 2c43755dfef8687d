"""Same calls: whether calls that follow each other in one graph compute the same from the same.

Values are numbered by op and operands; what a tensor holds is numbered anew by each op that writes to it. Calls
begin with inputs, weights and states of the same numbers. What a call takes from an earlier one may depend on
constants, and on weights that nobody writes to, alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from gascompile.capture.later.rounds import TracedCall
from gascompile.core.content import content_of
from gascompile.passes.graph.bound_aliases import may_share_memory
from gascompile.passes.graph.mutated_tensors import written_arguments

_RANDOM = torch.Tag.nondeterministic_seeded
_KNOWN = ("aten", "prim", "prims")
_Root = fx.Node | str
"""Who made a memory: an op, or the name of what is bound."""


class KeptError(Exception):
    """A call takes a value from an earlier one which may be another then."""


def later_difference(
    single: ExportedProgram,
    returned: TracedCall,
    several: ExportedProgram,
    canonical: Mapping[str, str],
    calls: Sequence[TracedCall],
) -> str | None:
    """Return how a later call differs from the first of its signature, or ``None`` where none does.

    Args:
        single: a trace of one call, its regions inlined.
        returned: by that call.
        several: the same of ``Rounds``, each of which ends with that call.
        canonical: name of a weight -> the first name of the same tensor.
        calls: those in ``several``.
    """
    try:
        (alone,) = _Numbers(single, canonical, [returned]).of_calls()
        numbers_of_calls = _Numbers(several, canonical, calls).of_calls()
    except KeptError as error:
        return str(error)
    first = {calls[-1].number: (returned, alone)}
    for call, numbers in zip(calls, numbers_of_calls, strict=True):
        known = first.setdefault(call.number, (call, numbers))
        if known[0].plain != call.plain:
            return "a later call returns another structure, or other values that are no tensors"
        if known[1] != numbers:
            return "a later call computes something else than the first"
    return None


class _Numbers:
    """Goes through the graph once."""

    def __init__(
        self,
        exported: ExportedProgram,
        canonical: Mapping[str, str],
        calls: Sequence[TracedCall],
    ) -> None:
        self._graph = exported.graph_module.graph
        self._outputs = _split(exported, calls)
        self._canonical = canonical
        self._exported = exported
        self._bound = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
        self._number: dict[fx.Node, str] = {}
        self._roots: dict[fx.Node, frozenset[_Root]] = {}
        self._call = 0
        self._call_of: dict[_Root, int] = {}
        self._writes: dict[_Root, str] = {}
        """What each memory holds, where that is not what it held at first."""
        self._tainted: set[_Root] = set()
        self._draws: list[str] = []
        self._find_memory()

    def of_calls(self) -> list[object]:
        """Return the numbers of what each call returns, writes and draws.

        Raises:
            KeptError: one takes from another what it may not.
        """
        numbers_of_calls: list[object] = []
        ends = dict(self._outputs)
        for node in self._graph.nodes:
            if node.op == "call_function" and node not in ends:
                self._take(node)
            if node in ends:
                numbers = [self._operand(v) if isinstance(v, fx.Node) else "" for v in ends[node]]
                states = {root: n for root, n in self._writes.items() if isinstance(root, str)}
                numbers_of_calls.append((numbers, states, self._draws))
                self._call, self._draws = self._call + 1, []
                self._writes = {r: n for r, n in self._writes.items() if isinstance(r, fx.Node)}
        return numbers_of_calls

    def _find_memory(self) -> None:
        """Number what the graph begins with, and find which ops write where."""
        for node in self._graph.nodes:
            if node.op in {"placeholder", "get_attr"}:
                self._number[node], root, is_input = self._begin(node)
                self._roots[node] = frozenset((root,))
                if is_input:
                    self._tainted.update((node, root))
            elif node.op == "call_function":
                shared = [a for a in node.all_input_nodes if may_share_memory(node, a)]
                roots = frozenset(root for a in shared for root in self._roots[a])
                self._roots[node] = roots or frozenset((node,))
        for node in self._graph.nodes:
            for argument in written_arguments(node):
                # A state, which is another one at each call.
                self._tainted.update(r for r in self._roots[argument] if isinstance(r, str))

    def _begin(self, node: fx.Node) -> tuple[str, _Root, bool]:
        if node.op == "get_attr":
            raise KeptError(f"its graph has a part of its own ({node.target})")
        spec = self._bound[node.name]
        if spec.kind is InputKind.CONSTANT_TENSOR:
            value = self._exported.constants.get(str(spec.target))
            return _content(value) or str(spec.target), f"constant {spec.target}", False
        if spec.kind in {InputKind.PARAMETER, InputKind.BUFFER}:
            name = self._canonical.get(str(spec.target), str(spec.target))
            return f"weight {name}", f"weight {name}", False
        return f"input {node.name}", f"input {node.name}", True

    def _take(self, node: fx.Node) -> None:
        """Number what an op returns and what it writes."""
        self._call_of[node] = self._call
        named: Any = lambda operand: _Number(self._operand(operand))  # noqa: E731
        target: Any = node.target
        parts = [f"{getattr(target, '__module__', '')}.{target}"]
        parts.append(repr(fx.map_arg((node.args, dict(node.kwargs)), named)))
        makes_up = _makes_up(target)
        if makes_up:
            parts.append(str(len(self._draws)))
        number = _digest("|".join(parts))
        self._number[node] = number
        if makes_up:
            self._draws.append(number)
        is_tainted = makes_up or "empty" in str(target)
        is_tainted = is_tainted or any(self._is_tainted(a) for a in node.all_input_nodes)
        if is_tainted:
            self._tainted.add(node)
        for argument in written_arguments(node):
            for root in self._roots[argument]:
                self._write(root, number, argument, is_tainted=is_tainted)

    def _write(self, root: _Root, number: str, argument: fx.Node, *, is_tainted: bool) -> None:
        if isinstance(root, fx.Node) and self._call_of[root] != self._call:
            raise KeptError(
                f"a later call writes to the tensor that an earlier one made{_line(argument)}"
            )
        self._writes[root] = _digest(self._writes.get(root, "") + number)
        if is_tainted:
            self._tainted.add(root)

    def _operand(self, node: fx.Node) -> str:
        """Return the number of what a value is now.

        Raises:
            KeptError: it is an earlier call's, and may be another one at each.
        """
        node = _written(node)
        if self._call_of.get(node, self._call) != self._call and self._is_tainted(node):
            raise KeptError(
                f"a later call uses what an earlier one computed from its inputs{_line(node)}"
            )
        writes = sorted(self._writes[root] for root in self._roots[node] if root in self._writes)
        return "@".join((self._number[node], *writes))

    def _is_tainted(self, node: fx.Node) -> bool:
        return node in self._tainted or not self._tainted.isdisjoint(self._roots[node])


class _Number:
    """An operand; a string there is another thing."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"%{self._text}"


def _split(
    exported: ExportedProgram, calls: Sequence[TracedCall]
) -> list[tuple[fx.Node, list[Any]]]:
    """Return the mark of each call's end, of a single one the graph's, and what it returns."""
    (values,) = exported.graph_module.graph.output_node().args
    assert isinstance(values, (tuple, list))
    specs = exported.graph_signature.output_specs
    leaves = [
        value
        for value, spec in zip(values, specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    if len(calls) == 1:
        return [(exported.graph_module.graph.output_node(), leaves)]
    ends, begin = [], 0
    for call in calls:
        end = begin + call.num_leaves
        ends.append((leaves[end], leaves[begin:end]))
        begin = end + 1
    assert begin == len(leaves), "a trace returns what its calls return"
    return ends


def _written(node: fx.Node) -> fx.Node:
    """Return the tensor that ops in place have returned, as they write to it: a trace names it by the latest of them.

    That one may be a later call's, where what an earlier call was given is returned.
    """
    while (schema := getattr(node.target, "_schema", None)) is not None:
        returns = [value.alias_info for value in schema.returns]
        written = written_arguments(node)
        is_in_place = len(returns) == len(written) == 1 and returns[0] and returns[0].is_write
        if not is_in_place:
            break
        (node,) = written
    return node


def _makes_up(target: Any) -> bool:
    """Return whether an op gives other values each time, or is not known to give the same."""
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    return _RANDOM in target.tags or target.namespace not in _KNOWN


def _content(value: object) -> str | None:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.is_meta:
        return None
    outline = f"{value.dtype} {list(value.shape)} {list(value.stride())}"
    return _digest(f"{outline} {_digest(content_of(value))}")


def _line(node: fx.Node) -> str:
    """Return where in the program a value was computed."""
    lines = [x.strip() for x in str(node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    return f" at {files[-1].removeprefix('File ')}" if files else ""


def _digest(text: str | memoryview) -> str:
    raw = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
