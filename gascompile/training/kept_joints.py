"""Kept joints: traces of losses and their gradients in the cache, for steps of other budgets, options and optimizers.

Values are none of one: tensors are the model's of the day, and those that the model's digest met.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from gascompile.bundles.kept_captures import KeptCapture, trace_data
from gascompile.bundles.reuse import CachedPlan
from gascompile.capture.record.record import CaptureRecord
from gascompile.core.program import copied_graph, graph_module_of
from gascompile.training.capture.joint import Joint
from gascompile.training.planning.program_specs import program_of
from gascompile.training.state.aliasing import named_tensors
from gascompile.training.step_cache import unknown_code

_log = logging.getLogger("gascompile")
_GROUPS = ("gradients", "mutations", "views")
"""What of a joint is nodes by name."""


@dataclass(frozen=True, slots=True)
class NewJoint:
    """A new trace as it is kept."""

    trace: Mapping[str, Any]
    held: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    why_not: str | None

    @classmethod
    def of(cls, place: CachedPlan, joint: Joint) -> NewJoint:
        """Take down what is kept of a trace, before it is used up; it has another output from here on."""
        numbers = {id(tensor): number for number, tensor in enumerate(place.printed.tensors)}
        first = len(joint.outside) - joint.num_constants
        read = [numbers.get(id(tensor)) for tensor in list(joint.outside.values())[:first]]
        held = dict(list(joint.outside.items())[first:])
        why = next(filter(None, map(unknown_code, joint.graph_module.graph.nodes)), None)
        if None in read or not all(tensor.is_contiguous() for tensor in held.values()):
            why = why or "it uses tensors to which no name leads, or that no file holds"
        groups = [getattr(joint, group) for group in _GROUPS]
        facts = {
            "outputs": len(joint.outputs),
            "groups": [list(group) for group in groups],
            "inputs": len(joint.inputs),
            "outside": read,
        }
        nodes = [*joint.outputs, *(node for group in groups for node in group.values())]
        program = program_of(joint, joint.graph_module.graph, nodes, "joint")
        return cls(trace_data(program) if why is None else {}, held, facts, why)

    def keep(self, place: CachedPlan, joint: Joint) -> None:
        """Keep it, unless another trace may differ."""
        record = joint.record
        assert isinstance(record, CaptureRecord), "it is new"
        why = self.why_not or next(iter(record.running.backward), None)
        place.keep_capture(self.trace, self.held, record, self.facts, why)


def joint_of(
    place: CachedPlan, kept: KeptCapture | None, model: nn.Module, capture: Callable[[], Joint]
) -> tuple[Joint, NewJoint | None]:
    """Return a kept trace, or a new one with what is to be kept of it."""
    joint = bound_joint(place, kept, model) if kept is not None else None
    if joint is not None:
        return joint, None
    joint = capture()
    return joint, NewJoint.of(place, joint) if place.traced else None


def copied(joint: Joint) -> Joint:
    """Return a trace of its own, as what is made of one changes it."""
    graph = copied_graph(joint.graph_module.graph)
    nodes = {node.name: node for node in graph.nodes}
    groups: dict[str, Any] = {
        group: {name: nodes[node.name] for name, node in getattr(joint, group).items()}
        for group in _GROUPS
    }
    return replace(
        joint,
        graph_module=graph_module_of(joint.graph_module, graph),
        loss=nodes[joint.loss.name],
        outputs=tuple(nodes[n.name] if isinstance(n, fx.Node) else n for n in joint.outputs),
        **groups,
    )


def bound_joint(place: CachedPlan, kept: KeptCapture, model: nn.Module) -> Joint | None:
    """Return a kept trace, bound to the model of today; ``None`` where it does not fit."""
    try:
        program, facts = kept.program, kept.facts
        _, tensors = named_tensors(model)
        graph = program.graph_module.graph
        names = [spec.name for spec in program.inputs]
        outside: dict[str, torch.Tensor] = {}
        read, num_inputs = facts["outside"], facts["inputs"]
        for number, name in enumerate(names[num_inputs:]):
            is_read = number < len(read)
            outside[name] = place.printed.tensors[read[number]] if is_read else kept.held[name]
        listed: Any = graph.output_node().args[0]
        results = iter(listed)
        outputs = tuple(next(results) for _ in range(facts["outputs"]))
        groups: dict[str, Any] = {
            group: {name: next(results) for name in members}
            for group, members in zip(_GROUPS, facts["groups"], strict=True)
        }
        return Joint(
            graph_module=program.graph_module,
            bound=dict(program.bindings),
            inputs=tuple(names[:num_inputs]),
            outside=outside,
            num_constants=len(outside) - len(read),
            loss=outputs[0],
            outputs=outputs,
            out_spec=pytree.tree_structure((0,)),
            tensors={name: tensors[name] for name in dict.fromkeys(program.bindings.values())},
            record=kept.known,
            **groups,
        )
    except (KeyError, IndexError, TypeError, StopIteration, ValueError) as error:
        _log.warning("the kept capture of %s does not fit (%s)", type(model).__name__, error)
        return None
