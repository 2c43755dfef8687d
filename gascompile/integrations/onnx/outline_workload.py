"""An ONNX graph becomes a planning problem without torch: its steps run on outlines, as they would be captured.

The ops, their names, sizes, kernels and memory are those of a capture: ``tests/integrations/test_onnx_outlines.py``
holds that for many models. Convolutions are taken to be oneDNN's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.sources import WeightSource
from gascompile.core.workload import Workload
from gascompile.integrations.onnx import outline_ops
from gascompile.integrations.onnx.backend import computing_with
from gascompile.integrations.onnx.graph import OnnxGraph, made_up_sizes, read_graph
from gascompile.integrations.onnx.outline import DTYPES, Log, Outline, Storage, op, recording
from gascompile.integrations.onnx.outline_views import clone
from gascompile.integrations.onnx.steps import check_value, run_step
from gascompile.integrations.onnx.values import Numbers, tensor
from gascompile.passes.graph.facts import Facts
from gascompile.passes.graph.op_costs import op_spec, tensor_specs

_ODD: Final = re.compile(r"[^0-9a-zA-Z_]+")
"""What names of a graph have none of."""
_own = op("clone_default")(clone)
"""The copy of an output that is a weight."""


def workload_of_file(path: Path, machine: Machine, *, batch: int, tokens: int) -> Workload:
    """Return the workload of an ONNX file on a machine.

    Args:
        path: of the file.
        machine: whose rates count.
        batch: of sizes with names along the first axis of inputs.
        tokens: of all other sizes with names.

    Raises:
        CheckpointError, UnsupportedOpError: as ``read_graph``; an op's sizes or costs are not known without torch.
    """
    graph = read_graph(path)
    sizes = made_up_sizes(graph.inputs, batch, tokens)
    is_host = machine.compute_backend != "cuda"
    with recording(groups_attention=is_host) as log, computing_with(outline_ops):
        bound, states = _bound(graph)
        # In the order, and with the names, that torch.export gives them.
        names = {name: log.unused(_ODD.sub("_", name)) for name in sizes}
        given = {
            name: Outline(sizes[name], DTYPES[graph.inputs[name][0]], storage=Storage(f"%{own}", 0))
            for name, own in names.items()
        }
        for value in (*bound.values(), *given.values()):
            value.storage.size_bytes = value.numel() * value.element_size()
        for name, value in given.items():
            check_value(f"the input '{name}'", value, graph.inputs[name])
        known = {
            name: Numbers.of(value, bound.get(name)) if isinstance(value, list) else value
            for name, value in graph.known.items()
        }
        values: dict[str, Any] = {**bound, **known, **given}
        for step in graph.steps:
            run_step(step, values)
        # Of outlines, as all values here are; ``tensor`` is declared for those of torch.
        results: list[Any] = [tensor(values[name]) for name in graph.outputs]
        outputs = _own_outputs(results, {v.storage.name for v in bound.values()} | states)
    states |= {value.storage.name for value in log.constants}
    return _workload(log, {**bound, **given}, outputs, states, machine)


def _bound(graph: OnnxGraph) -> tuple[dict[str, Outline], set[str]]:
    """Return the weights and constants by their names in the graph, and the names in plans of those that stay."""
    outline_of, states = {}, set()
    for name, source in in_module_order(graph.file.weights).items():
        if name in graph.used:
            weight = source.name if len(source.shape) == 2 else ""
            outline_of[name] = Outline(
                source.shape, DTYPES[source.dtype], storage=Storage(source.name, 0), weight=weight
            )
    for number, (name, (dtype, shape, _)) in enumerate(graph.held.items()):
        states.add(f"onnx_constant_{number}")
        storage = Storage(f"onnx_constant_{number}", 0)
        outline_of[name] = Outline(shape, DTYPES[dtype], storage=storage)
    return outline_of, states


def in_module_order(weights: Mapping[str, WeightSource]) -> dict[str, WeightSource]:
    """Return weights as a module lists them: its own, then those of each of its parts, which came in this order."""
    tree: dict[str, Any] = {}
    for name, source in weights.items():
        *parts, leaf = source.name.split(".")
        branch = tree
        for part in parts:
            branch = branch.setdefault(part, {})
        branch[leaf] = (name, source)

    def listed(branch: Mapping[str, Any]) -> Iterator[tuple[str, WeightSource]]:
        yield from (entry for entry in branch.values() if isinstance(entry, tuple))
        for part in branch.values():
            if isinstance(part, dict):
                yield from listed(part)

    return dict(listed(tree))


def _own_outputs(results: list[Outline], lasting: set[str]) -> list[Outline]:
    """Copy outputs that are a weight, or a view of one, as a capture does."""
    return [_own(value) if value.storage.name in lasting else value for value in results]


def _workload(
    log: Log,
    given: Mapping[str, Outline],
    outputs: list[Outline],
    states: set[str],
    machine: Machine,
) -> Workload:
    kept = _needed(log, outputs)
    kept = _without_copies(log, kept, outputs)
    ops = [log.ops[number] for number in kept]
    if not ops:
        raise UnsupportedOpError("the model computes nothing; there is nothing to plan")
    returned = frozenset(value.storage.name for value in outputs)
    read = {
        name for recorded in ops for name in (*recorded.facts.reads, *recorded.facts.writes)
    } | returned
    inputs = {value.storage.name for value in given.values() if value.storage.name.startswith("%")}
    # In the order of a capture's placeholders: what is bound, constants of the trace, inputs.
    ends = sorted((*given.values(), *log.constants), key=lambda v: v.storage.name.startswith("%"))
    sizes = {value.storage.name: value.storage.size_bytes for value in ends}
    sizes = {name: size for name, size in sizes.items() if name in read | inputs}
    for recorded in ops:
        sizes |= {name: log.made_bytes[name] for name in recorded.facts.writes}
    facts = Facts(ops=tuple(recorded.facts for recorded in ops), size_bytes=sizes, outputs=returned)
    bound = {name for name in sizes if not name.startswith("%")}
    device = machine.compute_tier
    return Workload(
        name="OnnxModel",
        repeats=True,
        tensors=tensor_specs(facts, inputs=inputs, bound=bound, states=states, forms={}),
        ops=tuple(
            op_spec(recorded.facts, states, device, machine, recorded.splits, recorded.gathers)
            for recorded in ops
        ),
    )


_VIEWS: Final = frozenset((
    "clone_default", "detach_", "expand", "getitem", "permute", "reshape", "select", "slice", "split_with_sizes",
    "squeeze", "t", "to", "unbind", "unsqueeze",
))  # fmt: skip
"""Ops that may return what they are given, or a part of it, or are outputs of a capture."""


def _without_copies(log: Log, kept: list[int], outputs: list[Outline]) -> list[int]:
    """Return the ops less the copies of constants that others only read, and let these read the constants."""
    gone: set[int] = set()
    for constant, copy in log.copies.items():
        readers = [log.ops[number] for number in kept if copy in log.ops[number].of]
        if copy not in kept or any(op_read.name in _VIEWS for op_read in readers):
            continue
        if any(value.op == copy for value in outputs):
            continue
        made = log.ops[copy].facts.reads[0]
        for reader in readers:
            reader.facts.reads = [constant if name == made else name for name in reader.facts.reads]
        gone |= {copy, copy - 1}
    return [number for number in kept if number not in gone]


def _needed(log: Log, outputs: list[Outline]) -> list[int]:
    """Return the numbers of the ops that outputs depend on, in order."""
    needed = {value.op for value in outputs}
    for number in reversed(range(len(log.ops))):
        if number in needed:
            needed |= log.ops[number].of
    return sorted(number for number in needed if number >= 0)
