"""Run a program on fake tensors at its largest shapes and record what every op allocates, aliases and costs.

Nothing is computed: fake tensors carry shapes, dtypes and storages. Composite ops are seen twice, as
the node the runtime calls and as the leaf ops they dispatch to, whose intermediates are workspace.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gascompile.core.deferral import deferring, safe_point
from gascompile.core.errors import UnsupportedOpError, first_line_of
from gascompile.core.parts import part_bytes
from gascompile.core.program import Dim, Program
from gascompile.core.true_strides import true_strides
from gascompile.cost_models.formulas.flops import flops_of, is_heavy
from gascompile.cost_models.formulas.kernel_workspace import is_proven, kernel_workspace_bytes
from gascompile.cost_models.measure.op_memory import OpCall, op_kind
from gascompile.formats.ops import DECODE, LINEAR, transfer_rows
from gascompile.formats.packings import packing_of
from gascompile.passes.graph.facts import SCALAR_BYTES, Decoded, Facts, LeafOp, OpFacts
from gascompile.passes.graph.fake_inputs import fake_inputs
from gascompile.passes.graph.fake_limits import limit_work
from gascompile.passes.graph.known_calls import KnownCalls, leaves_of
from gascompile.passes.graph.mutated_tensors import written_arguments

_Shapes = dict[str, tuple[int, ...]]


def propagate(program: Program) -> Facts:
    """Return the storages, kernels and workspace of every op at the largest input shapes.

    Raises:
        UnsupportedOpError: an op cannot run on fake tensors, for example one whose output shape depends on values.
    """
    largest = {spec.name: spec.upper_shape() for spec in program.inputs}
    others = [
        facts
        for shapes in _other_shapes(program)
        if shapes != largest and (facts := _facts_at(program, shapes)) is not None
    ]
    copies = {op.name for facts in others for op in facts.ops if _makes_storage(op)}
    at_largest = _propagate(program, largest, copies)
    for ops in zip(at_largest.ops, *(facts.ops for facts in others), strict=True):
        # A kernel may take another way, and more, at other sizes.
        ops[0].workspace_bytes = max(op.workspace_bytes for op in ops)
    return at_largest


@deferring
def _propagate(program: Program, shapes: _Shapes, copies: set[str]) -> Facts:
    """Return the facts at ``shapes``; the ops named in ``copies`` make a storage of their own."""
    with true_strides():
        return _recorded(program, shapes, copies)


def _recorded(program: Program, shapes: _Shapes, copies: set[str]) -> Facts:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownCalls[_Recorder](mode)
    env: dict[torch.fx.Node, Any] = {}
    owners = _Owners()
    for node, tensor, name in fake_inputs(program, shapes, mode):
        env[node] = tensor
        if tensor is not None and not owners.known(tensor):
            owners.add(tensor, name)
    ops = tuple(
        _run_node(node, mode, env, owners, None if node.name in copies else known)
        for node in program.op_nodes()
    )
    (output,) = (n for n in program.graph_module.graph.nodes if n.op == "output")
    returned = pytree.tree_leaves(torch.fx.node.map_arg(output.args[0], env.__getitem__))
    outputs = {owners.name(value) for value in returned if isinstance(value, torch.Tensor)}
    return Facts(ops=ops, size_bytes=owners.size_bytes, outputs=frozenset(outputs))


def _other_shapes(program: Program) -> list[_Shapes]:
    """Return the smallest input shapes, and those just below the largest."""
    return [
        {
            spec.name: tuple(
                (dim.minimum if smallest else max(dim.maximum - 1, dim.minimum))
                if isinstance(dim, Dim)
                else dim
                for dim in spec.shape
            )
            for spec in program.inputs
        }
        for smallest in (True, False)
    ]


def _facts_at(program: Program, shapes: _Shapes) -> Facts | None:
    """Return the facts at ``shapes``; ``None`` where the program refuses these, as it will at run time, too."""
    try:
        return _propagate(program, shapes, set())
    except UnsupportedOpError:
        return None


def _makes_storage(op: OpFacts) -> bool:
    """Return whether an op makes a storage of its own.

    Whether ``contiguous`` or ``reshape`` copies depends on sizes. An op that does at some size is planned
    to do so at all, and the runtime copies where it would not.
    """
    return any(_is_own(name, op.name) for name in op.writes)


def _is_own(tensor: str, op: str) -> bool:
    return tensor == f"%{op}" or tensor.startswith(f"%{op}.")


_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError, ArithmeticError, LookupError)
_ROWS_BY_NAME = {"self", "dim", "index", "indices"}
_PART = 1 / 8
"""Of a tensor, at most, is a part that is worth to be told apart from the whole."""


class _Owners:
    """Names of storages by identity."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._keep: list[torch.UntypedStorage] = []
        self.size_bytes: dict[str, int] = {}

    def known(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._names

    def name(self, tensor: torch.Tensor) -> str:
        return self._names[tensor.untyped_storage()._cdata]

    def add(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        self._names[storage._cdata] = name
        self._keep.append(storage)
        self.size_bytes[name] = storage.nbytes()


def _run_node(
    node: torch.fx.Node,
    mode: FakeTensorMode,
    env: dict[torch.fx.Node, Any],
    owners: _Owners,
    known: KnownCalls[_Recorder] | None,
) -> OpFacts:
    """Run a node; without known calls its result has a storage of its own."""
    safe_point()
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    facts = OpFacts(name=node.name)
    given = [v for v in leaves_of((args, kwargs)) if isinstance(v, torch.Tensor)]
    facts.reads = list(dict.fromkeys(map(owners.name, given)))
    assert callable(node.target)
    try:
        env[node], recorder = _called(node, mode, args, kwargs, known)
        if known is None and isinstance(env[node], torch.Tensor) and owners.known(env[node]):
            with mode:
                env[node] = env[node].clone()
        results = leaves_of(env[node])
        fresh = [isinstance(v, torch.Tensor) and not owners.known(v) for v in results]
        tensors = [v for v in (*given, *results) if isinstance(v, torch.Tensor)]
        facts.has_one_dtype = len({v.dtype for v in tensors}) <= 1
        if facts.has_one_dtype and len({v.shape for v in tensors}) == 1 and tensors[0].ndim:
            facts.features = int(tensors[0].shape[-1])
    except _REFUSALS as error:
        reason = first_line_of(error)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise UnsupportedOpError(
                f"op '{node.name}' calls {getattr(node.target, '__name__', node.target)}, which is no ATen op "
                f"({reason}). Write transforms such as torch.func.vmap as batched tensor code."
            ) from error
        raise UnsupportedOpError(
            f"op '{node.name}' ({node.target}) cannot be planned, its shapes are not known ahead of time: {reason}. "
            "Move the op out of the model, or replace it by one whose output shape depends on input shapes only."
        ) from error
    if node.target is not operator.getitem:
        single = isinstance(env[node], torch.Tensor)
        for i, value in enumerate(results):
            if fresh[i] and not owners.known(value):
                name = f"%{node.name}" if single else f"%{node.name}.{i}"
                owners.add(value, name)
                owners.size_bytes[name] += _understated_bytes(node, i, args)
                facts.writes.append(name)
    mutated = _mutated(node, env, owners)
    facts.writes += mutated
    facts.patches = _patches(node, args, mutated, owners)
    facts.leaves = [*recorder.leaves]
    own_bytes = sum(owners.size_bytes[name] for name in facts.writes if _is_own(name, node.name))
    facts.workspace_bytes = max(recorder.peak_bytes - own_bytes, 0) + recorder.kernel_bytes
    if recorder.leaves:
        facts.workspace_bytes += SCALAR_BYTES
        facts.kind = op_kind(node.target, args, kwargs)
        facts.call = OpCall(node.target, args, dict(kwargs), own_bytes)
    if not recorder.is_proven:
        facts.unproven = OpCall(node.target, args, dict(kwargs), own_bytes)
    return facts


def _called(
    node: torch.fx.Node,
    mode: FakeTensorMode,
    args: Any,
    kwargs: Any,
    known: KnownCalls[_Recorder] | None,
) -> tuple[Any, _Recorder]:
    """Return what a node returns, and what was recorded of it or of one like it."""
    call = known.call_of(node, args, kwargs) if known is not None else None
    if known is not None and call is not None and (before := known.again(call)) is not None:
        return before
    recorder = _Recorder()
    assert callable(node.target)
    if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
        return args[0][args[1]], recorder
    with torch.no_grad(), mode, recorder:
        value = node.target(*args, **kwargs)
    if known is not None and call is not None:
        known.note(call, value, recorder)
    return value, recorder


def _understated_bytes(node: torch.fx.Node, element: int, args: Any) -> int:
    """Return by how much an output can be larger than its fake.

    The index outputs of bags are smaller there, and the statistics of reduced types, kept in float32.
    """
    if "native_batch_norm" in str(node.target) and element in (1, 2):
        image = args[0]
        is_reduced = image.dtype in (torch.bfloat16, torch.float16)
        return (4 - image.element_size()) * int(image.shape[1]) if is_reduced else 0
    if "embedding_bag" not in str(node.target) or element == 0:
        return 0
    _, indices, offsets = args[:3]
    return 8 * int(indices.numel() + offsets.numel() + 1)


def _mutated(node: torch.fx.Node, env: Mapping[torch.fx.Node, Any], owners: _Owners) -> list[str]:
    values = (env[argument] for argument in written_arguments(node))
    return list(dict.fromkeys(owners.name(v) for v in values if isinstance(v, torch.Tensor)))


def _patches(node: torch.fx.Node, args: Any, written: list[str], owners: _Owners) -> dict[str, int]:
    """Return the bytes that an op changes of what it writes, where that is some part of one tensor."""
    if len(written) != 1 or not args or not isinstance(args[0], torch.Tensor):
        return {}
    (name,) = written
    if len(written_arguments(node)) != 1 or owners.name(args[0]) != name:
        return {}
    if node.kwargs.keys() & _ROWS_BY_NAME:
        return {}
    size_bytes = part_bytes(node.target, args)
    return {name: size_bytes} if size_bytes <= _PART * owners.size_bytes[name] else {}


class _Recorder(TorchDispatchMode):
    """Records leaf ops and the bytes their results hold while one node runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.leaves: list[LeafOp] = []
        self.peak_bytes = 0
        self.kernel_bytes = 0
        self.is_proven = True
        """Whether formulas know all that the kernels take."""
        self._live_bytes = 0
        self._tensors: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        limit_work(func, args, len(self.leaves))
        result = func(*args, **(kwargs or {}))
        inputs = [v for v in leaves_of((args, kwargs)) if isinstance(v, torch.Tensor)]
        outputs = [v for v in leaves_of(result) if isinstance(v, torch.Tensor)]
        before = {value.untyped_storage()._cdata for value in inputs}
        given = {id(value) for value in inputs}
        fresh = [value for value in outputs if value.untyped_storage()._cdata not in before]
        for value in outputs:
            if id(value) not in given:
                self._track(value, is_fresh=value.untyped_storage()._cdata not in before)
        if fresh or func._schema.is_mutable:
            self.leaves.append(_leaf(func, args, kwargs or {}, result, inputs, outputs))
            own_bytes = kernel_workspace_bytes(func, args, inputs, outputs)
            self.kernel_bytes = max(self.kernel_bytes, own_bytes)
            self.is_proven = self.is_proven and is_proven(func, inputs, outputs)
        return result

    def _track(self, value: torch.Tensor, *, is_fresh: bool) -> None:
        """Count a storage that the op made for as long as a tensor, or a view of it, lives."""
        storage = value.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if self._tensors.get(key, 0) == 0:
            if not is_fresh:
                return
            self._live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self._tensors[key] = self._tensors.get(key, 0) + 1
        weakref.finalize(value, self._drop, key, size_bytes)

    def _drop(self, key: int, size_bytes: int) -> None:
        self._tensors[key] -= 1
        if self._tensors[key] == 0:
            self._live_bytes -= size_bytes


def _nbytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


_COSTED = ("aten", "prims", "prim", "gascompile")
"""Namespaces of ops of which the bytes are the cost where there is no formula for FLOPs."""
_ROW_READERS = {
    torch.ops.aten.embedding.default,
    torch.ops.aten.index_select.default,
    torch.ops.aten.gather.default,
}


def _decoded(func: Any, args: Any) -> Decoded | None:
    if func is DECODE and packing_of(args[1]) is not None:
        return Decoded(args[1], transfer_rows(args[0], args[1], args[2]) * args[2], 0)
    if func is not LINEAR:
        return None
    x, weight, _, form, _ = args
    columns = x.shape[-1]
    return Decoded(form, transfer_rows(weight, form, columns) * columns, x.numel() // columns)


def _leaf(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> LeafOp:
    flops = flops_of(func, args, kwargs, result)
    read_bytes = sum(_nbytes(value) for value in inputs)
    write_bytes = sum(_nbytes(value) for value in outputs)
    if func in _ROW_READERS:
        # Only the rows asked for are touched, not the whole table.
        read_bytes = min(read_bytes, write_bytes + sum(_nbytes(v) for v in inputs[1:]))
    floating = [v.dtype for v in (*inputs, *outputs) if v.dtype.is_floating_point]
    dtype = str(floating[0] if floating else (*outputs, *inputs)[0].dtype).removeprefix("torch.")
    return LeafOp(
        target=str(func),
        flops=flops or 0,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        dtype=dtype,
        decoded=_decoded(func, args),
        known=flops is not None or (func.namespace in _COSTED and not is_heavy(func)),
    )
