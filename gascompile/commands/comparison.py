"""``plan --compare``: what another tool's placement of the same model takes, beside the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gascompile.commands.output import fields, note
from gascompile.core.budget import Budget
from gascompile.core.plan import Plan
from gascompile.core.serial import digest, to_json
from gascompile.core.sizes import format_size, format_time
from gascompile.core.workload import Workload
from gascompile.cost_models.formulas.energy import plan_energy
from gascompile.integrations.device_map import Mapped
from gascompile.integrations.placements import OtherPlacement, Taken, read_placement, taken_by


def compared(
    text: str,
    source: Workload | str,
    made: Plan,
    budget: Budget,
    *,
    shape: tuple[int, int],
    cache_dir: Path,
) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return a comparison as JSON and for people.

    Args:
        text: the file, or llama.cpp's flags.
        source: what ``made`` is of.
        made: our plan.
        budget: that it has, and theirs gets.
        shape: rows and tokens of made-up inputs.
        cache_dir: of this call.

    Raises:
        DeviceMapError, FormatError, StorageError: as ``read_placement`` and ``taken_by`` do.
    """
    placement = read_placement(text)
    job = Mapped.of(
        source,
        made.machine,
        budget,
        batch=shape[0],
        tokens=shape[1],
        cache_dir=cache_dir,
        sites=bool(placement.site),
    )
    theirs = taken_by(placement, job)
    return _as_json(placement, theirs, made), _parts(placement, theirs, made)


def _as_json(placement: OtherPlacement, theirs: Taken, made: Plan) -> dict[str, Any]:
    tier = made.machine.compute_tier
    return {
        "model": made.workload.name,
        "machine": made.machine.name,
        "place": tier,
        "budget_bytes": made.budget_bytes[tier],
        "theirs": {
            "origin": placement.origin,
            "least_seconds": theirs.least_s,
            "seconds": theirs.plan.certificate.predicted_s,
            "required_bytes": theirs.required_bytes,
            "over_bytes": theirs.over_bytes,
            "link_bytes": dict(theirs.plan.link_bytes),
            **_energy(theirs.plan),
            "not_modelled": dict(placement.not_modelled),
        },
        "ours": {
            "strategy": made.strategy,
            "seconds": made.certificate.predicted_s,
            "required_bytes": made.peak_bytes[tier],
            "link_bytes": dict(made.link_bytes),
            **_energy(made),
            "plan": digest(made),
        },
    }


def _energy(plan: Plan) -> dict[str, Any]:
    energy = plan_energy(plan)
    return {} if energy is None else {"energy": to_json(energy)}


def _parts(placement: OtherPlacement, theirs: Taken, made: Plan) -> list[RenderableType]:
    tier, seconds = made.machine.compute_tier, theirs.plan.certificate.predicted_s
    took = format_time(seconds)
    if theirs.least_s < seconds:
        took = f"{format_time(theirs.least_s)} to {took}"
    over = f", over the budget by {format_size(theirs.over_bytes)}" if theirs.over_bytes else ""
    ours_s, ours_bytes = made.certificate.predicted_s, made.peak_bytes[tier]
    rows = [
        (placement.origin, f"{took}, {format_size(theirs.required_bytes)} of {tier}{over}"),
        ("this plan", f"{format_time(ours_s)}, {format_size(ours_bytes)} of {tier}"),
    ]
    table: list[RenderableType] = [fields(f"Per iteration of {made.workload.name}", rows)]
    left: list[Text] = [
        note(f"not modelled: {n}: {why}") for n, why in placement.not_modelled.items()
    ]
    return [*table, *left]
