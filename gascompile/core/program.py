"""A captured model: an FX graph of ATen ops with its weights, states and inputs by name.

Conventions that every pass and the runtime rely on:

* Placeholders come first: one per weight or state (``bindings`` maps the node's name to the tensor's),
  then one per user input in flattened order.
* Every other node but the output is a ``call_function`` and is op ``i`` of the workload, in order; the
  op carries the node's name.
* Tensor names of a workload: a weight or state keeps its name in the model; what a node ``n`` creates
  is ``%n`` (``%n.i`` for element ``i`` of a tuple result); a user input is ``%`` + its placeholder.
* Where a plan divides them, rows ``b`` to ``e`` of the weight ``w`` are ``w[b:e]``, and so are ops.
* The output node's single argument is the flat tuple of the model's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.strides import contiguous_strides, normal_strides, span_elements
from gascompile.core.workload import Forms

OP_NAME = "op"
"""Key in the ``meta`` of a node that is called otherwise than its op, as a node's name cannot hold it."""
STEP = "step"
"""Key in the ``meta`` of a node that carries out a step of a plan: the number of the step."""
SITE = "site"
"""Key in the ``meta`` of a node that runs elsewhere than on the tier that computes: the tier it runs on."""


def add_node(
    graph: torch.fx.Graph,
    target: Callable[..., Any],
    args: tuple[torch.fx.node.Argument, ...],
    kwargs: dict[str, torch.fx.node.Argument] | None = None,
    name: str | None = None,
) -> torch.fx.Node:
    """Insert a call. Its arguments are set afterwards: FX looks through those that a node is created with."""
    node = graph.create_node("call_function", target, name=name)
    # Past what FX does for attributes that nodes are found by, which takes longer than all the rest.
    object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)
    return node


def copied_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy of a graph of placeholders, calls and an output."""
    copy = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        if node.op == "call_function":
            copies[node] = add_node(copy, node.target, args, kwargs, node.name)
        else:
            copies[node] = copy.create_node(
                node.op, node.target, args, kwargs, node.name, node.type
            )
        copies[node].meta.update(node.meta)
    return copy


def graph_module_of(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return ``graph`` as a module whose code is written when somebody asks for it: a run needs none."""
    return _LazyGraphModule(root, graph)


def draws(target: object) -> bool:
    """Return whether an op draws random numbers."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )


def op_name(node: torch.fx.Node) -> str:
    """Return the name of the op that ``node`` is."""
    name: str = node.meta.get(OP_NAME, node.name)
    return name


def marks_of(graph: torch.fx.Graph) -> list[object]:
    """Return what tells two captures of a model apart: by node its op, its name, what it calls and what it reads."""
    return [
        [node.op, node.name, _named(node.target), [s.name for s in node.all_input_nodes]]
        for node in graph.nodes
    ]


def _named(target: object) -> str:
    """Return the name of what a node calls: of a function without its address, which is another in each process."""
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return str(getattr(target, "__name__", target))


def last_readers(nodes: Iterable[torch.fx.Node]) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return, by node, the values that no later one of ``nodes`` reads; a node without any has no entry."""
    last = {source: node for node in nodes for source in node.all_input_nodes}
    frees: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for source, reader in last.items():
        frees.setdefault(reader, []).append(source)
    return frees


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """A dynamic dimension: its name and the range that the capture holds for."""

    name: str
    minimum: int
    maximum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stride:
    """A stride that grows with dynamic dimensions: ``factor`` times their sizes."""

    factor: int
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One flattened user input: a tensor's signature, or a Python constant the graph was captured with."""

    name: str
    """Placeholder name."""
    path: str
    """Where the input stands in the call, e.g. ``input_ids`` or ``args[0]['mask']``."""
    dtype: str | None = None
    shape: tuple[int | Dim, ...] = ()
    device: str = "cpu"
    constant: str = ""
    """``repr`` of the captured value when the input is not a tensor."""
    stride: tuple[int | Stride, ...] | None = None
    """``None`` for those of a contiguous tensor."""
    written: bool = False
    """Whether ops write to it, which its owner sees after the call."""
    same_as: str = ""
    """An earlier input that is the very same tensor in each call; by its placeholder's name."""
    base: str = ""
    """An earlier input, or this one, in whose memory this one lies, where ops write to that."""
    offset_bytes: int = 0
    """From the beginning of ``base`` to that of this one; may be negative."""
    facts: tuple[str, ...] = ()
    """What the model's code has asked of it beside, and was told, as in ``storage_offset=0``; see ``input_facts``."""

    def strides_for(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the strides of an argument of ``shape``."""
        if self.stride is None:
            return contiguous_strides(shape)
        sizes = {
            dim.name: size
            for dim, size in zip(self.shape, shape, strict=True)
            if isinstance(dim, Dim)
        }
        strides = [
            math.prod((sizes[name] for name in step.dims), start=step.factor)
            if isinstance(step, Stride)
            else step
            for step in self.stride
        ]
        return normal_strides(shape, tuple(strides))

    def upper_shape(self) -> tuple[int, ...]:
        """Return the shape with every dynamic dimension at its maximum."""
        return tuple(dim.maximum if isinstance(dim, Dim) else dim for dim in self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSpec:
    """A weight or state as the graph expects it."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    """``None`` for those of a contiguous tensor."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the tensor, in elements."""
        return self.stride or contiguous_strides(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes from the first element to the last."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return span_elements(self.shape, self.strides) * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A captured graph and the names that tie it to its model."""

    name: str
    graph_module: torch.fx.GraphModule
    inputs: tuple[InputSpec, ...]
    bindings: Mapping[str, str]
    """Placeholder node name -> weight or state name. Tied weights are one name."""
    bound: Mapping[str, BoundSpec]
    """Weight or state name -> what the graph expects of it."""
    states: frozenset[str]
    """Names among ``bound`` that ops mutate."""
    in_spec: str
    """JSON of the pytree of ``(args, kwargs)``."""
    out_spec: str
    """JSON of the pytree of the outputs."""
    forms: Mapping[str, Forms] = field(default_factory=dict)
    """Weights that ``bound`` has in another form than they are computed in."""

    def __post_init__(self) -> None:
        """Refuse names of weights and states that would be those of inputs or results in a workload.

        Raises:
            UnsupportedOpError: one begins as those do.
        """
        for name in self.bound:
            if name.startswith("%"):
                raise UnsupportedOpError(
                    f"the parameter or buffer '{name}' has a name as inputs and results of ops have in plans, '%...'; "
                    "give it another one in the model"
                )

    def op_nodes(self) -> list[torch.fx.Node]:
        """Return the nodes that are ops, in execution order: op ``i`` of the workload is element ``i``."""
        return [node for node in self.graph_module.graph.nodes if node.op == "call_function"]


def program_marks(program: Program) -> list[object]:
    """Return what has to be equal in the captures of all ranks: their graphs and the tensors that these read."""
    bound = [[name, of.dtype, list(of.shape)] for name, of in sorted(program.bound.items())]
    return [marks_of(program.graph_module.graph), bound]
