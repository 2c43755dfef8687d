"""The backend of ``torch.compile``: each graph that Dynamo traces becomes a planned program.

``torch.compile(model, backend="gascompile", options={"budget": "8GiB"})``. All graphs of one such call, those of other
sizes and those between graph breaks, share the one budget. Python code between graphs runs as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gascompile.api.compile import compile as compile_model
from gascompile.api.compiled import CompiledModel
from gascompile.api.shared_budget import SharedBudget
from gascompile.core.errors import CompiledModelError

OPTIONS = frozenset(
    {
        "budget", "machine", "cache_dir", "time_limit_s", "mip_gap", "strategy", "weights", "fuse", "fuse_runs",
        "graphs", "on_exceed",
    }
)  # fmt: skip
"""Arguments of ``gascompile.compile`` that ``options=`` takes."""


class _Shared:
    """What graphs of one ``torch.compile`` share; lives as long as one of them."""

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self.options = options  # kept, so that no other object has its identity
        self.budget = SharedBudget()


_shared: weakref.WeakValueDictionary[int, _Shared] = weakref.WeakValueDictionary()


def backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return what runs a graph of Dynamo's within the budget; it is planned when it is called first.

    Args:
        graph_module: the graph, with parameters and buffers among its inputs.
        example_inputs: its inputs.
        options: see ``OPTIONS``; without a budget all that the machine holds is allowed.

    Raises:
        ValueError: an option is unknown or has no such value.
    """
    given = dict(options or {})
    unknown = given.keys() - OPTIONS
    if unknown:
        raise ValueError(
            f"unknown option '{min(unknown)}' of backend='gascompile': choose of {', '.join(sorted(OPTIONS))}"
        )
    module = _Graph(graph_module, example_inputs)
    # Ranks trace at times of their own.
    compiled = compile_model(module, mesh=False, **given)
    shared = _shared.setdefault(id(options), _Shared(options))
    shared.budget.add(compiled._gascompile)
    return _Call(module, compiled, shared)


class _Call:
    """A call as Dynamo makes it, with parameters and sizes among the arguments."""

    def __init__(self, module: _Graph, compiled: CompiledModel, shared: _Shared) -> None:
        self._module, self._compiled, self._shared = module, compiled, shared

    def __call__(self, *args: Any) -> Any:
        """Run the graph.

        Raises:
            CompiledModelError: a gradient is wanted.
        """
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in args
        ):
            raise CompiledModelError(
                "backend='gascompile' computes no gradients, and an input or a parameter wants some. Call the model "
                "under torch.no_grad() or torch.inference_mode(), or train with gascompile.compile_step"
            )
        self._module.bind(args)
        given = (
            args[i].item() if i in self._module.floats else args[i] for i in self._module.given
        )
        return self._compiled(*given)


class _Graph(nn.Module):
    """A graph of Dynamo's whose parameters and buffers are its own, and sizes those of its inputs."""

    def __init__(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        super().__init__()
        self.floats = _as_floats(graph_module)
        """Arguments that are Python numbers, each value of which gets a plan of its own."""
        # Not a lazy one, whose code is written when it is called first: in the middle of a capture.
        self.graph = torch.fx.GraphModule(graph_module, graph_module.graph)
        self.given: list[int] = []
        self.sizes: dict[int, tuple[int, int]] = {}
        """By argument the input and its dimension that have the size."""
        self.own: dict[int, str] = {}
        """By argument the name of the parameter or buffer."""
        nodes = graph_module.graph.find_nodes(op="placeholder")
        symbols: dict[str, tuple[int, int]] = {}
        for i, (node, value) in enumerate(zip(nodes, example_inputs, strict=True)):
            static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
            if isinstance(value, torch.Tensor) and static is not None:
                self.own[i] = node.name
                self._set(node.name, value)
            elif isinstance(value, torch.Tensor):
                for d, size in enumerate(_traced_sizes(node, value)):
                    symbols.setdefault(size, (i, d))
        for i, value in enumerate(example_inputs):
            if isinstance(value, torch.SymInt) and str(value) in symbols:
                self.sizes[i] = symbols[str(value)]
            elif i not in self.own:
                self.given.append(i)
        self.train(graph_module.training)

    def _set(self, name: str, value: torch.Tensor) -> None:
        kind = self._parameters if isinstance(value, nn.Parameter) else self._buffers
        kind[name] = value  # type: ignore[assignment]

    def bind(self, args: Sequence[Any]) -> None:
        """Take parameters that were replaced since."""
        for i, name in self.own.items():
            known = self._parameters.get(name, self._buffers.get(name))
            if args[i] is not known:
                self._set(name, args[i])

    def forward(self, *inputs: Any) -> Any:
        """Run the graph on what is neither its own nor a size."""
        values = dict(zip(self.given, inputs, strict=True))
        values |= {i: getattr(self, name) for i, name in self.own.items()}
        values |= {i: values[of].shape[d] for i, (of, d) in self.sizes.items()}
        return self.graph(*(values[i] for i in sorted(values)))


def _as_floats(graph_module: torch.fx.GraphModule) -> set[int]:
    """Have a graph take as Python numbers what Dynamo gives it as tensors in their place; return which arguments.

    A Python float that has changed between two calls comes as a tensor of one value, of which the graph asks the item.
    """
    found = set()
    for i, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        if not getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False):
            continue
        users = list(node.users)
        if all(user.op == "call_method" and user.target == "item" for user in users):
            found.add(i)
            for user in users:
                user.replace_all_uses_with(node)
                graph_module.graph.erase_node(user)
    if found:
        graph_module.recompile()
    return found


def _traced_sizes(node: torch.fx.Node, value: torch.Tensor) -> list[str]:
    """Return the sizes of an input by their symbols, where they have some."""
    traced = node.meta.get("example_value")
    return [str(size) for size in (traced if isinstance(traced, torch.Tensor) else value).shape]
