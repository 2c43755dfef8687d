"""Capture: an nn.Module and example inputs become a ``Program``.

The module is traced by ``torch.export`` over fake parameters, so no weight is read, copied or computed
with. The graph is left undecomposed: composite ops run faster and the graph is half the size.
"""

from __future__ import annotations

import inspect
import operator
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from gascompile.errors import CaptureError, UnsupportedOpError
from gascompile.fake_twin import fake_twin
from gascompile.program import BoundSpec, Dim, InputSpec, Program

_ASSERTS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}
_CASTS = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.lift_fresh_copy.default,
}
_HIDDEN_STATISTICS = {
    # Ops that update running statistics although their schema does not say so: (arguments, flag).
    torch.ops.aten.batch_norm.default: ((3, 4), 5),
    torch.ops.aten.instance_norm.default: ((3, 4), 5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A program, the real tensors found on the way, and what the names of the model map to."""

    program: Program
    constants: Mapping[str, torch.Tensor]
    """Tensors that are part of the graph but not of the module's parameters and buffers."""
    canonical: Mapping[str, str]
    """Name in the model -> name in the program; tied weights share one."""


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    device: str = "cpu",
) -> Capture:
    """Trace ``model`` on example inputs.

    ``args`` and ``kwargs`` are only looked at for their structure, shapes and dtypes. ``dynamic_shapes``
    is what ``torch.export.export`` takes; every dynamic dimension needs a maximum.

    Raises:
        CaptureError: the model cannot be traced; names its line and the way out.
    """
    twin, canonical = fake_twin(model, device=device)
    try:
        with torch.no_grad():
            exported = torch.export.export(
                twin, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:  # torch.export raises whatever the model's own code raises
        raise _capture_error(model, error) from error
    return _to_program(type(model).__name__, exported, canonical, args, kwargs)


def _capture_error(model: nn.Module, error: Exception) -> CaptureError:
    torch_root = torch.__file__.rsplit("/", 1)[0]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(torch_root)
        and not frame.filename.endswith(("gascompile/capture.py", "<string>"))
    ]
    where = (
        f" at {frames[-1].filename}:{frames[-1].lineno}: {(frames[-1].line or '').strip()!r}"
        if frames
        else ""
    )
    text = str(error)
    if "pytree" in text:
        advice = (
            "return tensors, tuples, lists, dicts or dataclasses, register the type with "
            "torch.utils._pytree.register_pytree_node, or switch it off (for a cache: use_cache=False)"
        )
    elif "data-dependent" in text.lower() or "unbacked" in text.lower():
        advice = (
            "the model's control flow depends on tensor values: use torch.where or torch.cond there, "
            "or state what holds with torch._check, or compile the part of the model around it"
        )
    else:
        advice = (
            "check that model(*args, **kwargs) itself runs on these example inputs; if it does, compile the "
            "submodules around this line one by one"
        )
    summary = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return CaptureError(
        f"{type(model).__name__} cannot be captured{where}: {type(error).__name__}: {summary}. What to do: {advice}."
    )


def _to_program(
    name: str,
    exported: torch.export.ExportedProgram,
    canonical: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Capture:
    graph_module = exported.graph_module
    _inline_wrappers(graph_module)
    _drop_no_ops(graph_module.graph)
    user_inputs, bound_names, constants = _read_signature(exported, canonical)
    bindings, bound = _bind_placeholders(graph_module.graph, bound_names)
    _lift_attributes(graph_module, bindings, bound, constants)
    in_spec = exported.call_spec.in_spec
    out_spec = exported.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    inputs = _input_specs(exported, graph_module.graph, user_inputs, args, kwargs)
    _order_placeholders(graph_module.graph, set(bindings), [spec.name for spec in inputs])
    graph_module.graph.lint()
    graph_module.recompile()
    program = Program(
        name=name,
        graph_module=graph_module,
        inputs=inputs,
        bindings=bindings,
        bound=bound,
        states=_mutated(graph_module.graph, bindings),
        in_spec=pytree.treespec_dumps(in_spec),
        out_spec=pytree.treespec_dumps(out_spec),
    )
    return Capture(program=program, constants=constants, canonical=canonical)


def _inline_wrappers(graph_module: torch.fx.GraphModule) -> None:
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
        body_at = wrappers[target]
        body = graph_module.get_submodule(str(node.args[body_at].target))
        assert isinstance(body, torch.fx.GraphModule)
        _inline_wrappers(body)
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


def _drop_no_ops(graph: torch.fx.Graph) -> None:
    """Remove assertions and casts that return their input; eager does not compute them either."""
    for node in list(graph.nodes):
        if node.target in _ASSERTS:
            graph.erase_node(node)
        elif node.target in _CASTS and isinstance(node.args[0], torch.fx.Node):
            before, after = node.args[0].meta.get("val"), node.meta.get("val")
            forced = node.kwargs.get("copy") or True in node.args[1:]
            if (
                isinstance(before, torch.Tensor)
                and isinstance(after, torch.Tensor)
                and not forced
                and before.dtype == after.dtype
                and before.device == after.device
                and before.stride() == after.stride()
                and (node.target is not torch.ops.aten.lift_fresh_copy.default)
            ):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
    graph.eliminate_dead_code()


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
            if spec.kind is InputKind.CONSTANT_TENSOR:
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
        bound[tensor] = BoundSpec(
            dtype=str(value.dtype).removeprefix("torch."), shape=tuple(int(d) for d in value.shape)
        )
    return bindings, bound


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
            raise UnsupportedOpError(f"the graph reads the attribute '{node.target}', which is not a tensor")
        tensor = str(node.target)
        first = next(iter(graph_module.graph.nodes))
        with graph_module.graph.inserting_before(first):
            placeholder = graph_module.graph.placeholder(f"c_{tensor.replace('.', '_')}")
        placeholder.meta["val"] = node.meta.get("val", value)
        node.replace_all_uses_with(placeholder)
        graph_module.graph.erase_node(node)
        bindings[placeholder.name] = tensor
        bound[tensor] = BoundSpec(
            dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape)
        )
        constants[tensor] = value.detach()


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
            specs.append(InputSpec(name=name, path=label, constant=repr(leaf)))
            continue
        shape = tuple(_dim(size, exported, label) for size in nodes[name].meta["val"].shape)
        specs.append(
            InputSpec(
                name=name,
                path=label,
                dtype=str(leaf.dtype).removeprefix("torch."),
                shape=shape,
                device=leaf.device.type,
            )
        )
    return tuple(specs)


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


def _mutated(graph: torch.fx.Graph, bindings: Mapping[str, str]) -> frozenset[str]:
    """Return the bound tensors that some op writes, directly or through a view."""
    owners: dict[torch.fx.Node, set[str]] = {}
    mutated: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            owners[node] = {bindings[node.name]} if node.name in bindings else set()
            continue
        inputs = {name for arg in node.all_input_nodes for name in owners[arg]}
        owners[node] = set()
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            owners[node] = inputs
        elif isinstance(node.target, torch._ops.OpOverload):
            mutated |= _written(node, lambda arg: owners[arg])
            if any(value.alias_info is not None for value in node.target._schema.returns):
                owners[node] = inputs
    return frozenset(mutated)


def _written(node: torch.fx.Node, owners: Callable[[torch.fx.Node], set[str]]) -> set[str]:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    names: set[str] = set()
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            names |= owners(item) if isinstance(item, torch.fx.Node) else set()
    positions, flag = _HIDDEN_STATISTICS.get(target, ((), 0))
    if positions and node.args[flag]:
        for position in positions:
            value = node.args[position]
            names |= owners(value) if isinstance(value, torch.fx.Node) else set()
    return names


def normalize_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with every nameable positional argument as a keyword, in the signature's order.

    ``f(x, mask=m)`` and ``f(mask=m, x=x)`` thereby meet the same plan.
    """
    return bind_call(positional_names(model), args, kwargs)


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of ``model.forward``'s leading positional-or-keyword parameters."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            break
        names.append(parameter.name)
    return tuple(names)


def bind_call(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Name the positional arguments by ``names``; what has no name stays positional."""
    if len(args) > len(names):
        return args, dict(kwargs)
    bound = dict(zip(names, args, strict=False))
    twice = bound.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"the argument '{min(twice)}' is given by position and by name")
    merged = {**bound, **kwargs}
    order = {name: i for i, name in enumerate(names)}
    return (), dict(sorted(merged.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))
