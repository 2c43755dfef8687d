"""Summaries of plans and workloads, as JSON data and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from gascompile.commands.output import counted, fields, grid
from gascompile.core.plan import Certificate, Plan, TensorPlan
from gascompile.core.reports import Energy
from gascompile.core.sizes import format_size, format_time
from gascompile.core.workload import OpSpec, TensorKind, Workload
from gascompile.passes.bounds.certify import EVERYTHING, WEIGHTS


def sizes(values: Mapping[str, int]) -> str:
    """Return sizes per tier or link on one line, without those where there is nothing."""
    shown = (f"{name} {format_size(size)}" for name, size in values.items() if size)
    return ", ".join(shown) or "none"


def weights_of(plan: Plan) -> tuple[list[TensorPlan], list[TensorPlan]]:
    """Return the resident and the streamed weights."""
    site = plan.machine.compute_tier
    weights = [t for t in plan.tensors.values() if t.kind == TensorKind.WEIGHT]
    return [w for w in weights if w.home == site], [w for w in weights if w.home != site]


def plan_parts(plan: Plan) -> list[RenderableType]:
    """Return the summary of a plan for people."""
    from gascompile.cost_models.formulas.energy import plan_energy

    resident, streamed = weights_of(plan)
    site = plan.machine.compute_tier
    rows = [
        ("machine", plan.machine.name),
        ("budget", sizes(plan.budget_bytes)),
        ("planned peak", sizes(plan.peak_bytes)),
        (f"resident in {site}", _count(resident)),
        ("streamed", _count(streamed)),
        *_form_rows(plan),
        ("moved / iteration", sizes(plan.link_bytes)),
        *_certificate_rows(plan.certificate),
        *energy_rows(plan_energy(plan)),
        ("strategy", plan.strategy),
    ]
    return [fields(f"Plan for {plan.workload.name}", rows)]


def energy_rows(energy: Energy | None) -> list[tuple[str, str]]:
    """Return the energy of an iteration; nothing where it is not known."""
    if energy is None:
        return []
    return [("energy", f"{energy.joules:.3g} J per iteration (by a {energy.source}, not measured)")]


def _form_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the bytes of the weights that move in another form than they are computed in."""
    size_bytes: dict[str, int] = {}
    for tensor in plan.tensors.values():
        if tensor.forms is not None:
            wire = tensor.forms.wire
            size_bytes[wire] = size_bytes.get(wire, 0) + tensor.size_bytes
    return [("other forms", sizes(size_bytes))] if size_bytes else []


def _count(weights: Sequence[TensorPlan]) -> str:
    return f"{counted(len(weights), 'weight')}, {format_size(sum(w.size_bytes for w in weights))}"


_HELD = {EVERYTHING: "all plans", WEIGHTS: "plans that move weights alone"}


def _all_row(certificate: Certificate) -> list[tuple[str, str]]:
    if certificate.holds_over == EVERYTHING or not certificate.lower_bound_all_s:
        return []
    gap = 1 - certificate.lower_bound_all_s / certificate.predicted_s
    bound = f"{format_time(certificate.lower_bound_all_s)} (gap {gap:.2%})"
    return [("of all plans", bound)]


def _certificate_rows(certificate: Certificate) -> list[tuple[str, str]]:
    return [
        ("predicted", f"{format_time(certificate.predicted_s)} per iteration"),
        (
            "lower bound",
            f"{format_time(certificate.lower_bound_s)} (gap {certificate.gap:.2%}) of {_HELD[certificate.holds_over]}",
        ),
        *_all_row(certificate),
        ("physical limit", f"{format_time(certificate.limit_s)}, set by {certificate.binding}"),
        ("solver", f"{certificate.status.value} after {format_time(certificate.solve_s)}"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTotal:
    """What all ops of one kind add up to."""

    kind: str
    count: int
    flops: int
    moved_bytes: int
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.moved_bytes if self.moved_bytes else 0.0


def totals_by_kind(ops: Sequence[OpSpec], kinds: Sequence[str], device: str) -> list[KindTotal]:
    """Return totals per kind, the longest first; ``kinds[i]`` is the kind of op ``i``."""
    groups: dict[str, list[OpSpec]] = {}
    for op, kind in zip(ops, kinds, strict=True):
        groups.setdefault(kind, []).append(op)
    totals = [
        KindTotal(
            kind=kind,
            count=len(group),
            flops=sum(op.flops for op in group),
            moved_bytes=sum(op.read_bytes + op.write_bytes for op in group),
            seconds=sum(op.time_s.get(device, 0.0) for op in group),
        )
        for kind, group in groups.items()
    ]
    return sorted(totals, key=lambda total: (-total.seconds, total.kind))


def workload_summary(
    workload: Workload, totals: Sequence[KindTotal], unknown: Sequence[str], machine: str
) -> dict[str, Any]:
    """Return what ``gascompile annotate --json`` prints."""
    return {
        "model": workload.name,
        "machine": machine,
        "repeats": workload.repeats,
        "num_ops": len(workload.ops),
        "tensors": {
            kind: {"count": count, "bytes": size} for kind, count, size in _tensor_totals(workload)
        },
        "seconds": sum(total.seconds for total in totals),
        "flops": sum(total.flops for total in totals),
        "op_kinds": [
            {
                "kind": t.kind,
                "count": t.count,
                "flops": t.flops,
                "bytes": t.moved_bytes,
                "arithmetic_intensity": t.intensity,
                "seconds": t.seconds,
            }
            for t in totals
        ],
        "unknown_ops": list(unknown),
    }


def workload_parts(
    workload: Workload, totals: Sequence[KindTotal], machine: str
) -> list[RenderableType]:
    """Return the summary of a workload for people."""
    rows = [("machine", machine), ("ops", str(len(workload.ops)))]
    rows += [
        (f"{kind} tensors", f"{count}, {format_size(size)}")
        for kind, count, size in _tensor_totals(workload)
    ]
    rows.append(("compute", format_time(sum(total.seconds for total in totals))))
    columns = [
        ("op", False),
        ("count", True),
        ("GFLOP", True),
        ("moved", True),
        ("FLOP/B", True),
        ("time", True),
    ]
    lines = [
        (
            t.kind,
            str(t.count),
            f"{t.flops / 1e9:.3g}",
            format_size(t.moved_bytes),
            f"{t.intensity:.3g}",
            format_time(t.seconds),
        )
        for t in totals
    ]
    return [fields(f"Workload of {workload.name}", rows), grid("Time by op", columns, lines)]


def _tensor_totals(workload: Workload) -> list[tuple[str, int, int]]:
    totals = []
    for kind in TensorKind:
        chosen = [t.size_bytes for t in workload.tensors if t.kind == kind]
        if chosen:
            totals.append((kind.value, len(chosen), sum(chosen)))
    return totals
