"""An exported program becomes a ``Program``: straight-line ops, named tensors, ordered placeholders."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from gascompile.capture.drop_no_ops import drop_no_ops
from gascompile.capture.record.record import Recorded
from gascompile.capture.storage_offsets import check_offsets
from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.program import BoundSpec, Dim, InputSpec, Program, Stride
from gascompile.core.signature import constant_of, strides_of
from gascompile.core.strides import contiguous_strides
from gascompile.core.tiles import parse_tile
from gascompile.passes.graph.bound_aliases import bound_aliases
from gascompile.passes.graph.mutated_tensors import mutated_tensors
from gascompile.weights.checkpoint import FILE_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A program, the real tensors found on the way, and what the names of the model map to."""

    program: Program
    constants: Mapping[str, torch.Tensor]
    """Tensors that are part of the graph but not of the module's parameters and buffers."""
    canonical: Mapping[str, str]
    """Name in the model -> name in the program; tied weights share one."""
    record: Recorded | None = None
    """What the capture read beside these; of a kept one, what it depends on."""


def to_program(
    name: str,
    exported: torch.export.ExportedProgram,
    canonical: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Capture:
    """Return the program of ``exported``, which was traced on ``args`` and ``kwargs``.

    ``canonical`` maps each name of the model to the first name of the same tensor.

    Raises:
        UnsupportedOpError: the graph holds control flow or inputs that no plan has a place for.
        CaptureError: a dynamic dimension has no maximum.
    """
    graph_module = exported.graph_module
    inline_wrappers(graph_module)
    drop_no_ops(graph_module.graph)
    user_inputs, bound_names, constants = _read_signature(exported, canonical)
    bindings, bound = _bind_placeholders(graph_module.graph, bound_names)
    _lift_attributes(graph_module, bindings, bound, constants)
    in_spec = exported.call_spec.in_spec
    out_spec = exported.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    inputs = _input_specs(exported, graph_module.graph, user_inputs, args, kwargs)
    _order_placeholders(graph_module.graph, set(bindings), [spec.name for spec in inputs])
    _own_outputs(graph_module.graph, bindings)
    check_offsets(graph_module.graph, {**bindings, **{spec.name: spec.path for spec in inputs}})
    graph_module.graph.lint()
    graph_module.recompile()
    states = mutated_tensors(graph_module.graph, bindings)
    _check_bound(bound, states, constants)
    program = Program(
        name=name,
        graph_module=graph_module,
        inputs=inputs,
        bindings=bindings,
        bound=bound,
        states=states,
        in_spec=_dumped(in_spec, "takes"),
        out_spec=_dumped(out_spec, "returns"),
    )
    return Capture(program=program, constants=constants, canonical=canonical)


def _check_bound(
    bound: Mapping[str, BoundSpec], states: frozenset[str], constants: Mapping[str, torch.Tensor]
) -> None:
    for name in sorted(states & constants.keys()):
        raise UnsupportedOpError(
            f"the model mutates '{name}', a tensor in a plain attribute, which has no place to keep its value: "
            f"make it a buffer, as in self.register_buffer('{name.rpartition('.')[2]}', value)"
        )
    for name, spec in bound.items():
        if parse_tile(name) is not None:
            message = f"the parameter or buffer '{name}' is called like rows of a weight; rename it in the model"
            raise UnsupportedOpError(message)
        if spec.dtype not in FILE_DTYPES:
            raise UnsupportedOpError(
                f"'{name}' has the dtype {spec.dtype}, which safetensors files cannot hold; use one of "
                f"{', '.join(sorted(FILE_DTYPES))}"
            )


def _dumped(spec: pytree.TreeSpec, verb: str) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError as error:
        raise CaptureError(
            f"the model {verb} a type that a saved program cannot name ({error}). What to do: use a plain tuple or "
            "dict there, or register the type: torch.utils._pytree._register_namedtuple(cls, serialized_type_name=...) "
            "for a named tuple, torch.utils._pytree.register_pytree_node(...) for others"
        ) from error


def inline_wrappers(graph_module: torch.fx.GraphModule) -> None:
    """Replace grad-mode and disabled-autocast regions by their bodies."""
    wrappers = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
    for node in list(graph_module.graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        target = node.target.name()
        if target not in wrappers or (target == "wrap_with_autocast" and node.args[2]):
            raise UnsupportedOpError(
                f"the captured graph holds the higher-order op '{target}' ({node.name}); "
                "GASCompile runs straight-line graphs: compile the branches separately, or leave autocast off"
            )
        if target == "wrap_with_autocast" and torch.is_autocast_enabled(str(node.args[0])):
            raise UnsupportedOpError(
                f"a part of the model ({node.name}) switches autocast of '{node.args[0]}' off, which is on around it; "
                "compile and call it outside of autocast, or compile the parts one by one"
            )
        body_at = wrappers[target]
        body = graph_module.get_submodule(str(node.args[body_at].target))
        assert isinstance(body, torch.fx.GraphModule)
        inline_wrappers(body)
        values = dict(
            zip(
                (n for n in body.graph.nodes if n.op == "placeholder"),
                node.args[body_at + 1 :],
                strict=True,
            )
        )
        with graph_module.graph.inserting_before(node):
            results = graph_module.graph.graph_copy(body.graph, val_map=values)
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(results, (tuple, list)):
                user.replace_all_uses_with(results[user.args[1]])
                graph_module.graph.erase_node(user)
        if node.users:
            node.replace_all_uses_with(results)
        graph_module.graph.erase_node(node)
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph_module.graph.erase_node(node)


def _read_signature(
    exported: torch.export.ExportedProgram, canonical: Mapping[str, str]
) -> tuple[list[str], dict[str, str], dict[str, torch.Tensor]]:
    """Return user placeholder names, bound placeholder -> tensor name, and constants by name."""
    user_inputs: list[str] = []
    bound_names: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            user_inputs.append(spec.arg.name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            bound_names[spec.arg.name] = canonical.get(spec.target, spec.target)
            if spec.kind is InputKind.CONSTANT_TENSOR and spec.target not in canonical:
                value = exported.constants[spec.target]
                assert isinstance(value, torch.Tensor)
                constants[spec.target] = value.detach()
        else:
            raise UnsupportedOpError(
                f"the model takes a {spec.kind.name.lower()} ({spec.arg.name}), which has no place in a plan; "
                "pass tensors or Python constants"
            )
    return user_inputs, bound_names, constants


def _bind_placeholders(
    graph: torch.fx.Graph, bound_names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, BoundSpec]]:
    """Drop unused bound placeholders, merge tied ones, and describe the rest."""
    bindings: dict[str, str] = {}
    bound: dict[str, BoundSpec] = {}
    first: dict[str, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "placeholder" or node.name not in bound_names:
            continue
        tensor = bound_names[node.name]
        if tensor in first:
            node.replace_all_uses_with(first[tensor])
        if not node.users:
            graph.erase_node(node)
            continue
        first[tensor] = node
        bindings[node.name] = tensor
        value = node.meta["val"]
        bound[tensor] = _bound_spec(value)
    return bindings, bound


def _bound_spec(value: torch.Tensor) -> BoundSpec:
    shape, stride = tuple(int(size) for size in value.shape), strides_of(value)
    return BoundSpec(
        dtype=str(value.dtype).removeprefix("torch."),
        shape=shape,
        stride=None if stride == contiguous_strides(shape) else stride,
    )


def _lift_attributes(
    graph_module: torch.fx.GraphModule,
    bindings: dict[str, str],
    bound: dict[str, BoundSpec],
    constants: dict[str, torch.Tensor],
) -> None:
    """Turn tensors that the graph reads as attributes into bound placeholders."""
    for node in list(graph_module.graph.nodes):
        if node.op != "get_attr":
            continue
        value: Any = graph_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise UnsupportedOpError(
                f"the graph reads the attribute '{node.target}', which is not a tensor"
            )
        tensor = str(node.target)
        first = next(iter(graph_module.graph.nodes))
        with graph_module.graph.inserting_before(first):
            placeholder = graph_module.graph.placeholder(f"c_{tensor.replace('.', '_')}")
        placeholder.meta["val"] = node.meta.get("val", value)
        node.replace_all_uses_with(placeholder)
        graph_module.graph.erase_node(node)
        bindings[placeholder.name] = tensor
        bound[tensor] = _bound_spec(value)
        constants[tensor] = value.detach()


def _own_outputs(graph: torch.fx.Graph, bindings: Mapping[str, str]) -> None:
    """Copy every output that is a weight or buffer, or a view of one: their memory is reused after the call."""
    owners = bound_aliases(graph, bindings)
    (output,) = (node for node in graph.nodes if node.op == "output")
    for node in dict.fromkeys(output.all_input_nodes):
        if owners[node]:
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (node,))
            copied.meta["val"] = node.meta["val"]
            output.replace_input_with(node, copied)


def _input_specs(
    exported: torch.export.ExportedProgram,
    graph: torch.fx.Graph,
    user_inputs: list[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[InputSpec, ...]:
    leaves = pytree.tree_flatten_with_path((args, dict(kwargs)))[0]
    assert len(leaves) == len(user_inputs), "torch.export flattened the inputs in another way"
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    specs = []
    for name, (path, leaf) in zip(user_inputs, leaves, strict=True):
        label = _path_label(path)
        if not isinstance(leaf, torch.Tensor):
            specs.append(InputSpec(name=name, path=label, constant=constant_of(leaf)))
            continue
        value = nodes[name].meta["val"]
        shape = tuple(_dim(size, exported, label) for size in value.shape)
        specs.append(
            InputSpec(
                name=name,
                path=label,
                dtype=str(leaf.dtype).removeprefix("torch."),
                shape=shape,
                device=leaf.device.type,
                stride=_strides(value, leaf, shape, label),
            )
        )
    return tuple(specs)


def _strides(
    value: torch.Tensor, leaf: torch.Tensor, shape: tuple[int | Dim, ...], label: str
) -> tuple[int | Stride, ...] | None:
    """Return the strides of an input by its dimensions, ``None`` for those of a contiguous one."""
    if strides_of(leaf) == contiguous_strides(leaf.shape):
        return None
    names = {dim.name for dim in shape if isinstance(dim, Dim)}
    strides: list[int | Stride] = []
    steps: tuple[Any, ...] = value.stride()
    for step in steps:
        if not isinstance(step, torch.SymInt):
            strides.append(step)
            continue
        factor, powers = step.node.expr.as_coeff_Mul()
        factors = {str(base): power for base, power in powers.as_powers_dict().items()}
        if not (factor.is_Integer and factors.keys() <= names):
            raise CaptureError(
                f"input '{label}' has the strides {list(leaf.stride())}, which its dynamic dimensions do not "
                "determine; pass it contiguous, as in x.contiguous()"
            )
        dims = tuple(name for name, power in sorted(factors.items()) for _ in range(int(power)))
        strides.append(Stride(factor=int(factor), dims=dims))
    return tuple(strides)


def _path_label(path: tuple[Any, ...]) -> str:
    """Return ``input_ids`` for ``[1]['input_ids']`` and ``args[0]`` for positional inputs."""
    root, *rest = path
    if root.idx == 1 and rest and isinstance(rest[0], pytree.MappingKey):
        return f"{rest[0].key}{pytree.keystr(tuple(rest[1:]))}"
    return f"args{pytree.keystr(tuple(rest))}"


def _dim(size: int | torch.SymInt, exported: torch.export.ExportedProgram, label: str) -> int | Dim:
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    if not expression.is_Symbol:
        raise CaptureError(
            f"a dynamic dimension of input '{label}' is the expression {expression}; give the inputs that depend "
            "on each other the same torch.export.Dim"
        )
    bounds = exported.range_constraints[expression]
    if not bounds.upper.is_Integer:
        raise CaptureError(
            f"the dynamic dimension {expression} of input '{label}' has no maximum, so no plan can promise a peak; "
            "give it one, as in torch.export.Dim('sequence', max=2048)"
        )
    return Dim(name=str(expression), minimum=int(bounds.lower), maximum=int(bounds.upper))


def _order_placeholders(graph: torch.fx.Graph, bound: set[str], user_inputs: list[str]) -> None:
    """Put bound placeholders first, then one placeholder per user input in flattened order."""
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    ordered = [node for name, node in nodes.items() if name in bound]
    ordered += [nodes[name] for name in user_inputs]
    anchor = graph._root
    for node in ordered:
        if anchor.next is not node:
            anchor.append(node)
        anchor = node
