"""A plan as one HTML file: certificate, timeline, memory, tensors, what-if, and beside it what a run measured.

The file needs no network. What it shows is data in JSON, which its script turns into text nodes and drawings: a name
of a tensor can be nothing else than text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport
from gascompile.core.sizes import format_size, format_time
from gascompile.cost_models.simulate.trace import Trace
from gascompile.passes.bounds.certify import EVERYTHING
from gascompile.passes.explain.briefly import Brief, briefly
from gascompile.passes.explain.explain import TensorExplanation, explain
from gascompile.passes.explain.whatif import WhatIf
from gascompile.report.lanes import end_s, lanes
from gascompile.report.phrases import change_of, signed

Row = list[str]
_DATA = "/*DATA*/"
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def page(
    plan: Plan,
    trace: Trace,
    *,
    whatif: WhatIf | None = None,
    run: RunReport | None = None,
    num_explained: int = 0,
    made_by: str = "GASCompile",
) -> str:
    """Return the text of the file.

    Args:
        plan: verified.
        trace: of the plan, on its own machine or another one.
        whatif: what changes would be worth, to be shown, too.
        run: what a run of the plan measured.
        num_explained: of the weights that move or are waited for most, so many have the price of their alternatives;
            each is planned anew.
        made_by: stands at the end.
    """
    template = resources.files("gascompile.report").joinpath("page.html").read_text("utf-8")
    data = {"made_by": made_by, **_data(plan, trace, whatif, run, num_explained)}
    text = json.dumps(data, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return template.replace(_DATA, text)


def _data(
    plan: Plan, trace: Trace, whatif: WhatIf | None, run: RunReport | None, num_explained: int
) -> dict[str, Any]:
    certificate = plan.certificate
    names = _Names()
    return {
        "model": plan.workload.name,
        "machine": trace.machine,
        "facts": _facts(plan, trace),
        "bars": [
            ["physical limit", certificate.limit_s, f"set by {certificate.binding}"],
            ["lower bound", certificate.lower_bound_s, _bounded(plan)],
            ["predicted", trace.seconds, f"strategy '{plan.strategy}'"],
            *([["measured", run.seconds, ""]] if run is not None else []),
        ],
        "end_us": _us(end_s(trace)),
        "lanes": [
            {
                "name": lane.name,
                "note": lane.note,
                "spans": [
                    [_us(s.begun_s), _us(s.ended_s - s.begun_s), s.kind, names.number(s.label)]
                    for s in lane.spans
                ],
            }
            for lane in lanes(plan, trace)
        ],
        "memory": _memory(plan, trace),
        "tensors": [
            [
                names.number(b.name),
                b.kind.value,
                b.size_bytes,
                b.home,
                b.moved_bytes,
                b.stall_s,
                b.why,
            ]
            for b in _briefs(plan, trace, num_explained)
        ],
        "whatif": _variants(plan, whatif),
        "run": _measured(plan, trace, run),
        "warnings": list(plan.warnings),
        # Last: numbers are given on the way.
        "names": names.listed,
    }


class _Names:
    """Gives each name a number: a name stands once in the file."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of a name."""
        if name not in self._numbers:
            self._numbers[name] = len(self.listed)
            self.listed.append(name)
        return self._numbers[name]


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def _sizes(values: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{name} {format_size(size)}" for name, size in values.items() if size) or "none"
    )


def _bounded(plan: Plan) -> str:
    held = (
        "all plans"
        if plan.certificate.holds_over == EVERYTHING
        else "plans that move weights alone"
    )
    return f"of {held}"


def _facts(plan: Plan, trace: Trace) -> list[Row]:
    certificate = plan.certificate
    stalled_s = sum(stall.time_s for stall in trace.stalls)
    return [
        ["budget", _sizes(plan.budget_bytes)],
        ["planned peak", _sizes(plan.peak_bytes)],
        ["moved in an iteration", _sizes(trace.link_bytes)],
        ["ops wait", f"{format_time(stalled_s)} of {format_time(trace.seconds)}"],
        ["gap to the bound", f"{certificate.gap:.2%}"],
        ["solver", f"{certificate.status.value} after {format_time(certificate.solve_s)}"],
    ]


def _memory(plan: Plan, trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "tier": tier,
            "budget": plan.budget_bytes.get(tier),
            "peak": curve.peak_bytes,
            "times": [_us(time_s) for time_s in curve.times_s],
            "uses": {
                use: list(column) for use, column in curve.bytes_by_use.items() if any(column)
            },
        }
        for tier, curve in trace.memory.items()
        if curve.peak_bytes
    ]


def _briefs(plan: Plan, trace: Trace, num_explained: int) -> list[Brief]:
    """Return a line for each tensor; those that matter most have their alternatives' price in it."""
    brief_of = {brief.name: brief for brief in briefly(plan, trace)}
    worst = sorted(brief_of.values(), key=lambda brief: (-brief.stall_s, -brief.moved_bytes))
    for brief in worst[:num_explained]:
        said = explain(plan, brief.name)
        if isinstance(said, TensorExplanation) and said.reason:
            brief_of[brief.name] = replace(brief, why=f"{brief.why}; {said.reason}")
    return list(brief_of.values())


def _variants(plan: Plan, whatif: WhatIf | None) -> list[Row]:
    if whatif is None:
        return []
    rows = []
    for variant in whatif.variants:
        name = change_of(plan, variant)
        if variant.predicted_s is None or variant.change_s is None:
            rows.append([name, f"needs {format_size(variant.required_bytes or 0)}", "", ""])
            continue
        speedup = variant.speedup(whatif.base_s)
        proven = variant.proven_change_s
        rows.append(
            [
                name,
                format_time(variant.predicted_s),
                signed(variant.change_s) + (f" ({speedup:+.1%})" if speedup is not None else ""),
                signed(proven) if proven is not None else "",
            ]
        )
    return rows


def _measured(plan: Plan, trace: Trace, run: RunReport | None) -> list[Row]:
    """Return what was predicted, and what a run measured."""
    if run is None:
        return []
    stalled_s = sum(stall.time_s for stall in trace.stalls)
    rows = [
        ["one iteration", format_time(trace.seconds), format_time(run.seconds)],
        ["ops wait", format_time(stalled_s), format_time(run.stall_s)],
    ]
    rows += _pairs("peak in", plan.peak_bytes, run.peak_bytes)
    rows += _pairs("moved over", trace.link_bytes, run.link_bytes)
    return rows


def _pairs(what: str, predicted: Mapping[str, int], measured: Mapping[str, int]) -> Sequence[Row]:
    places = [
        place for place in {**predicted, **measured} if predicted.get(place) or measured.get(place)
    ]
    return [
        [f"{what} {p}", format_size(predicted.get(p, 0)), format_size(measured.get(p, 0))]
        for p in places
    ]
