"""A trace as a picture: what devices and links do, and what each tier holds, over one iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gascompile.core.errors import GASCompileError
from gascompile.core.plan import Plan
from gascompile.core.sizes import GIB, KIB, MIB, format_size, format_time
from gascompile.cost_models.simulate.memory_curve import (
    ACTIVATIONS,
    STATES,
    STREAMED,
    WEIGHTS,
    WORKSPACE,
)
from gascompile.cost_models.simulate.trace import Trace
from gascompile.report.lanes import OP, RECOMPUTED, WAITING, PictureLane, end_s, lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

# The palette of Okabe and Ito, which people with any kind of colour vision can tell apart.
_BLUE, _SKY, _GREEN = "#0072B2", "#56B4E9", "#009E73"
_ORANGE, _VERMILLION, _PURPLE, _GREY = "#E69F00", "#D55E00", "#CC79A7", "#B8B8B8"
_YELLOW = "#F0E442"
_SPAN_COLORS = {
    OP: _BLUE,
    RECOMPUTED: _PURPLE,
    WAITING: _VERMILLION,
    "fetch": _YELLOW,
    "prefetch": _SKY,
    "reload": _GREEN,
    "offload": _ORANGE,
}
_USE_COLORS = {
    STATES: _GREY,
    WEIGHTS: _BLUE,
    STREAMED: _SKY,
    ACTIVATIONS: _ORANGE,
    WORKSPACE: _PURPLE,
}
_LANE_INCHES, _CURVE_INCHES, _FLAT_INCHES, _FRAME_INCHES = 0.45, 1.5, 0.4, 1.9
_WIDTH_INCHES = 11.0  # of a page across
_LETTERS_PER_WIDTH = 140
"""How many letters of a label fit side by side into the picture."""
_SUFFIXES = (".png", ".svg")


def picture(plan: Plan, trace: Trace, path: str | Path) -> None:
    """Draw ``trace`` to ``path``, a ``.png`` or ``.svg`` file.

    Raises:
        GASCompileError: matplotlib is not installed, or the file cannot be written.
        ValueError: the suffix names another format.
    """
    _draw(plan, {_title(plan, trace): trace}, path)


def picture_of_several(plan: Plan, traces: Mapping[str, Trace], path: str | Path) -> None:
    """Draw traces of one plan below each other, on the same scale of time, each under its name.

    Raises:
        GASCompileError: matplotlib is not installed, or the file cannot be written.
        ValueError: the suffix names another format, or there is no trace.
    """
    if not traces:
        raise ValueError("there is no trace to draw; pass at least one")
    _draw(plan, {f"{name}: {_title(plan, t)}": t for name, t in traces.items()}, path)


def _draw(plan: Plan, traces: Mapping[str, Trace], path: str | Path) -> None:
    target = Path(path)
    if target.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a picture is a {' or '.join(_SUFFIXES)} file, not '{target.name}'")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GASCompileError(
            "pictures need matplotlib; install it with: pip install 'gascompile[plot]'"
        ) from error
    heights = [_heights(plan, trace) for trace in traces.values()]
    frames = [sum(rows) + _FRAME_INCHES + 0.45 * (len(rows) - 1) for rows in heights]
    last_s = max(map(end_s, traces.values()))
    style: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    # Text stays text in an SVG, and its ids do not change from one run to the next.
    style |= {"svg.fonttype": "none", "svg.hashsalt": "gascompile"}
    with rc_context(style):
        figure = Figure(figsize=(_WIDTH_INCHES, sum(frames)), layout="constrained")
        panels = figure.subfigures(len(frames), 1, height_ratios=frames, squeeze=False)
        for panel, rows, (title, trace) in zip(panels[:, 0], heights, traces.items(), strict=True):
            _draw_panel(panel, plan, trace, rows, last_s)
            panel.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        try:
            metadata = {"Date": None} if target.suffix.lower() == ".svg" else {}
            figure.savefig(target, dpi=150, metadata=metadata)
        except OSError as error:
            raise GASCompileError(
                f"cannot write {target}: {error.strerror or error}; choose another folder"
            ) from error


def _tiers(trace: Trace) -> list[str]:
    return [tier for tier, curve in trace.memory.items() if curve.peak_bytes]


def _heights(plan: Plan, trace: Trace) -> list[float]:
    """Return the inches of the lanes and of each tier's memory."""
    curves = (_curve_inches(trace, tier) for tier in _tiers(trace))
    return [_LANE_INCHES * len(lanes(plan, trace)), *curves]


def _draw_panel(
    panel: SubFigure, plan: Plan, trace: Trace, heights: list[float], last_s: float
) -> None:
    axes = panel.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    scale, unit = _time_scale(last_s)
    _draw_lanes(axes[0][0], lanes(plan, trace), trace, scale)
    for row, tier in zip(axes[1:], _tiers(trace), strict=True):
        _draw_memory(row[0], tier, plan, trace, scale)
    axes[-1][0].set_xlabel(f"time in one iteration ({unit})")
    axes[-1][0].set_xlim(0, last_s * scale)


def _curve_inches(trace: Trace, tier: str) -> float:
    """Return the height of a tier's memory; what never changes needs little."""
    return _CURVE_INCHES if len(set(trace.memory[tier].total_bytes)) > 1 else _FLAT_INCHES


def _title(plan: Plan, trace: Trace) -> str:
    stalled_s = sum(stall.time_s for stall in trace.stalls)
    share = f" ({stalled_s / trace.seconds:.0%})" if trace.seconds else ""
    return (
        f"{plan.workload.name} on {trace.machine}: {format_time(trace.seconds)} per iteration, "
        f"{format_time(stalled_s)} of it waiting{share}"
    )


def _time_scale(seconds: float) -> tuple[float, str]:
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return scale, unit
    return 1e6, "us"


# ---------------------------------------------------------------- devices and links


def _draw_lanes(axes: Axes, drawn: Sequence[PictureLane], trace: Trace, scale: float) -> None:
    kinds: dict[str, Any] = {}
    letter_s = end_s(trace) / _LETTERS_PER_WIDTH
    for number, lane in enumerate(drawn):
        edge = "white" if len(lane.spans) <= 120 else "none"
        for kind, color in _SPAN_COLORS.items():
            bars = [
                (span.begun_s * scale, (span.ended_s - span.begun_s) * scale)
                for span in lane.spans
                if span.kind == kind
            ]
            if bars:
                hatch = "////" if kind == WAITING else None
                kinds[kind] = axes.broken_barh(
                    bars,
                    (number - 0.38, 0.76),
                    facecolor=color if not hatch else "white",
                    edgecolor=_VERMILLION if hatch else edge,
                    linewidth=0.6,
                    hatch=hatch,
                )
        for span in lane.spans:
            times = (span.begun_s * scale, span.ended_s * scale)
            _label(axes, number, times, span.label, span.kind, letter_s * scale)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    names = [
        lane.name + f"{', ' * bool(lane.note)}{lane.note}".replace("busy, ", "busy\n")
        for lane in drawn
    ]
    axes.set_yticks(range(len(drawn)), names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    causes: dict[str, float] = {}
    for stall in trace.stalls:
        causes[stall.cause] = causes.get(stall.cause, 0.0) + stall.time_s
    if causes:
        parts = ", ".join(f"{cause} {format_time(time_s)}" for cause, time_s in causes.items())
        axes.set_title(f"waiting because of: {parts}", loc="left", fontsize=9)
    _legend(axes, list(kinds.values()), list(kinds))


def _label(
    axes: Axes, lane: int, span: tuple[float, float], label: str, kind: str, letter: float
) -> None:
    """Write a label into its bar where it fits, or as much of its end as does."""
    room = int((span[1] - span[0]) / letter) if letter else 0
    parts = label.removesuffix(".weight").split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    text = next((end for end in (label, *ends) if len(end) <= room), "")
    if not text:
        return
    dark = kind in (OP, RECOMPUTED, "reload")
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.text(
        (span[0] + span[1]) / 2,
        lane,
        text,
        ha="center",
        va="center",
        fontsize=7.5,
        color="white" if dark else "black",
        bbox=background if kind == WAITING else None,
        clip_on=True,
    )


def _legend(axes: Axes, handles: list[Any], labels: list[str]) -> None:
    axes.legend(
        handles,
        labels,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=max(1, len(labels)),
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.2,
    )


# ---------------------------------------------------------------- memory


def _draw_memory(axes: Axes, tier: str, plan: Plan, trace: Trace, scale: float) -> None:
    curve = trace.memory[tier]
    peak, budget = curve.peak_bytes, plan.budget_bytes.get(tier)
    unit_bytes, unit = next(
        ((size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if peak >= size),
        (1, "B"),
    )
    times = [time_s * scale for time_s in curve.times_s]
    uses = list(curve.bytes_by_use)
    layers = axes.stackplot(
        times,
        *([size / unit_bytes for size in curve.bytes_by_use[use]] for use in uses),
        colors=[_USE_COLORS[use] for use in uses],
        step="post",
        linewidth=0,
    )
    handles: list[Any] = list(layers)
    labels = uses
    title = f"{tier} memory: at most {format_size(peak)}"
    # A budget far above what is used would squeeze the curve flat.
    if budget is not None and budget <= 3 * peak:
        line = axes.axhline(budget / unit_bytes, color="black", linewidth=1.2, linestyle="--")
        handles, labels = [*handles, line], [*labels, f"budget {format_size(budget)}"]
        axes.set_ylim(0, 1.08 * max(budget, peak) / unit_bytes)
    else:
        axes.set_ylim(0, 1.15 * peak / unit_bytes)
        title += f" of {format_size(budget)}" if budget is not None else ""
    axes.set_ylabel(unit)
    axes.locator_params(axis="y", nbins=5 if _curve_inches(trace, tier) > 1 else 2)
    axes.set_title(title, loc="left", fontsize=9)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    _legend(axes, handles, labels)
