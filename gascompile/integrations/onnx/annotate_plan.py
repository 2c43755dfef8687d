"""A plan written into an ONNX graph: where ops run as multi-device annotations, where weights live as metadata.

ONNX (IR 11 and later) knows devices, on which nodes place what they return; it knows no homes, addresses or moves.
Those are metadata, under names that begin with ``gascompile.``. What is not proven to be an op of the plan gets
nothing.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gascompile.core import serial
from gascompile.core.plan import Plan
from gascompile.core.tiles import base_name
from gascompile.integrations.onnx.from_program import OP

if TYPE_CHECKING:
    import onnx_ir

CONFIGURATION: Final = "gascompile"
"""Name of the device configuration: one per plan, and one plan per file."""
_PREFIX: Final = "gascompile."
HOME, ADDRESS, HOMES = "gascompile.home", "gascompile.address", "gascompile.homes"
_IR_VERSION: Final = 11
"""The first with device configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotated:
    """What of a plan stands in a graph."""

    devices: tuple[str, ...]
    num_nodes: int
    num_placed: int
    """Nodes with a device."""
    unplaced: Mapping[str, int]
    """By ONNX's op, nodes that are not proven to be ops of the plan, or are several that run on different devices."""
    num_ops: int
    ops_without_node: tuple[str, ...]
    """Ops of the plan that no node stems from: constants that were computed, and what changes no value."""
    home_bytes: Mapping[str, int]
    """Bytes of the weights whose homes are noted, by place."""
    weights_without_home: tuple[str, ...]
    """Weights of the graph that the plan does not have."""


def annotate_plan(
    model: onnx_ir.Model,
    plan: Plan,
    *,
    ops: Mapping[onnx_ir.Node, Sequence[str]],
    weights: Mapping[str, str],
) -> Annotated:
    """Write ``plan`` into ``model``.

    Args:
        model: changed in place; annotations of an earlier plan go.
        plan: of the same graph.
        ops: names of the ops that each node is, or is part of.
        weights: name in the plan of each initializer that is a weight.
    """
    _without_earlier(model)
    model.ir_version = max(model.ir_version, _IR_VERSION)
    sites = _sites(plan)
    placed = {
        node: site for node in model.graph
        if (site := _site(node, ops.get(node, ()), sites, _reads(plan), weights)) is not None
    }  # fmt: skip
    # The tier that computes is a device even where no node is known to run on it.
    own = plan.machine.compute_tier
    devices = (own, *sorted({site for site in placed.values() if site != own}))
    configuration = model.add_device_configuration(CONFIGURATION, device_names=devices)
    staged = _goes_forward([devices.index(site) for site in placed.values()])
    for node, site in placed.items():
        _place(node, configuration, devices.index(site), is_staged=staged)
        node.metadata_props[OP] = " ".join(ops[node])
    homes, missing = _note_homes(model, plan, weights)
    _note_plan(model, plan)
    named = {name for node in placed for name in ops[node]}
    return Annotated(
        devices=devices,
        num_nodes=len(model.graph),
        num_placed=len(placed),
        unplaced=dict(Counter(node.op_type for node in model.graph if node not in placed)),
        num_ops=len(sites),
        ops_without_node=tuple(name for name in sites if name not in named),
        home_bytes=homes,
        weights_without_home=missing,
    )


def _without_earlier(model: onnx_ir.Model) -> None:
    """Remove what an earlier plan has left."""
    if any(configuration.name == CONFIGURATION for configuration in model.device_configurations):
        model.remove_device_configuration(CONFIGURATION, cascade=True)
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [value for node in model.graph for value in node.outputs]
    tensors = [value.const_value for value in values if value.const_value is not None]
    for annotated in (model, model.graph, *model.graph, *values, *tensors):
        for key in [key for key in annotated.metadata_props if key.startswith(_PREFIX)]:
            del annotated.metadata_props[key]


def _sites(plan: Plan) -> dict[str, str | None]:
    """Return where each whole op runs; ``None`` for one whose parts run on different tiers."""
    site_of: dict[str, str | None] = {}
    for op in plan.ops:
        name = base_name(op.name)
        site_of[name] = op.site if site_of.get(name, op.site) == op.site else None
    return site_of


def _reads(plan: Plan) -> dict[str, set[str]]:
    """Return the tensors that each whole op reads, as whole ones."""
    reads_of: dict[str, set[str]] = {}
    for spec in plan.workload.ops:
        reads_of.setdefault(base_name(spec.name), set()).update(map(base_name, spec.reads))
    return reads_of


def _site(
    node: onnx_ir.Node,
    names: Sequence[str],
    sites: Mapping[str, str | None],
    reads: Mapping[str, set[str]],
    weights: Mapping[str, str],
) -> str | None:
    """Return where a node runs: where all of the ops that it is do, if these read the weights that it reads."""
    if not names or any(name not in sites for name in names):
        return None
    taken = {weights[str(v.name)] for v in node.inputs if v is not None and v.name in weights}
    # An op that reads nothing is a view; who reads the values is another.
    read = [reads[name] for name in names]
    if taken and all(read) and not taken <= set().union(*read):
        return None
    sites_of_ops = {sites[name] for name in names}
    return sites_of_ops.pop() if len(sites_of_ops) == 1 else None


def _goes_forward(stages: Sequence[int]) -> bool:
    """Return whether nodes go from device to device and never back, as stages of a pipeline do."""
    return all(before <= after for before, after in itertools.pairwise(stages))


def _place(node: onnx_ir.Node, configuration: Any, device: int, *, is_staged: bool) -> None:
    """Say that what a node returns is on a device, whole."""
    import onnx_ir

    specs = tuple(
        onnx_ir.ShardingSpec(value=value, device=(device,)) for value in node.outputs if value.name
    )
    placed = onnx_ir.NodeDeviceConfiguration(
        configuration=configuration,
        sharding_specs=specs,
        pipeline_stage=device if is_staged else None,
    )
    node.device_configurations = (*node.device_configurations, placed)


def _note_homes(
    model: onnx_ir.Model, plan: Plan, weights: Mapping[str, str]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Note on each weight where it lives; return the bytes by place, and what the plan does not have."""
    parts: dict[str, list[str]] = {}
    for name in plan.tensors:
        parts.setdefault(base_name(name), []).append(name)
    size_bytes: Counter[str] = Counter()
    missing = []
    for name, value in model.graph.initializers.items():
        if name not in weights:
            continue
        held = parts.get(weights[name], [])
        if not held:
            missing.append(name)
            continue
        homes = {part: plan.tensors[part].home for part in held}
        for part in held:
            size_bytes[homes[part]] += plan.tensors[part].size_bytes
        if len(set(homes.values())) == 1:
            value.metadata_props[HOME] = homes[held[0]]
        else:
            # Rows of it live in several places.
            rows = {part.removeprefix(weights[name]): home for part, home in homes.items()}
            value.metadata_props[HOMES] = json.dumps(rows)
        address = plan.tensors[held[0]].address
        if len(held) == 1 and address is not None:
            value.metadata_props[ADDRESS] = str(address)
    return dict(size_bytes), tuple(missing)


def _note_plan(model: onnx_ir.Model, plan: Plan) -> None:
    """Note what the plan is of, for and worth."""
    notes: dict[str, Any] = {
        "plan": {
            "format": Plan.FORMAT,
            "workload": plan.workload.name,
            "strategy": plan.strategy,
            "machine": plan.machine.name,
            "budget_bytes": dict(plan.budget_bytes),
            "peak_bytes": dict(plan.peak_bytes),
            "link_bytes": dict(plan.link_bytes),
        },
        "certificate": serial.to_json(plan.certificate),
        "fingerprint": dict(plan.fingerprint),
        "steps": dict(Counter(step.TAG for step in plan.steps)),
    }
    for key, note in notes.items():
        model.metadata_props[f"{_PREFIX}{key}"] = json.dumps(note)
