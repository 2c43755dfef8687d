"""Write the newest result of ``inference_offload`` into the README, between its two markers.

``python -m benchmarks.readme_table`` writes; with ``--check`` it only says whether the README is up to
date. What a result does not hold is shown as ``-``, so that results of older formats can be shown too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme_section import fill_in, read_result, table
from gascompile.core.sizes import format_size

BEGIN = "<!-- inference_offload:begin -->"
END = "<!-- inference_offload:end -->"
_MISSING = "-"
_LIMIT = (
    "The limit is the larger of two times measured in the same run: reading the bytes that the plan "
    "streams, and running with all weights in memory."
)


def newest_result(folder: Path) -> Path | None:
    """Return the result file of the latest date in ``folder``; ``None`` when there is none.

    Raises:
        SystemExit: a file cannot be read.
    """
    found = [
        (str(read_result(path).get("date", "")), path)
        for path in folder.glob("inference_offload-*.json")
    ]
    return max(found)[1] if found else None


def render(result: dict[str, Any], source: str) -> str:
    """Return the tables of a result as Markdown; ``source`` is where it can be looked up."""
    return "\n\n".join(
        (
            _setting(result, source),
            table(
                ("tokens", "GASCompile", "accelerate", "speed-up", "limit", "of limit", "peak"),
                [_steady_row(row) for row in _rows(result, "steady_state")],
            ),
            _LIMIT,
            _first_output(result),
            table(
                ("budget", "one token", "predicted", "peak", "streamed"),
                [_curve_row(row) for row in _rows(result, "curve")],
            ),
        )
    )


def _get(data: Any, *path: str) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _rows(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = result.get(name)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _number(data: Any, *path: str) -> float | None:
    found = _get(data, *path)
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return float(found) if is_number else None


def _shown(value: float | None, pattern: str) -> str:
    return _MISSING if value is None else pattern.format(value)


def _size(value: float | None) -> str:
    return _MISSING if value is None else format_size(value)


def _setting(result: dict[str, Any], source: str) -> str:
    row = next(iter(_rows(result, "steady_state")), {})
    host = _get(result, "environment", "processor") or "an unknown processor"
    cores = _shown(_number(result, "environment", "cores"), "{:.0f}")
    memory = _size(_number(result, "environment", "memory_bytes"))
    versions = [
        f"{name} {found}"
        for name in ("torch", "accelerate", "transformers")
        if (found := _get(result, "environment", "versions", name))
    ]
    model = f"A random Llama of {_weights(result.get('model'))} within a budget of"
    budget = _size(_number(row, "gascompile", "budget_bytes"))
    where = ", ".join([f"on {host} with {cores} cores and {memory} of memory", *versions])
    runs = _shown(_number(result, "runs"), "{:.0f}")
    link = f"[{source}]({source})"
    return (
        f"{model} {budget}, {where}. {_isolation(row)} Times are medians of {runs} runs; "
        f"measured on {result.get('date', _MISSING)}: {link}."
    )


def _isolation(row: dict[str, Any]) -> str:
    group = _number(row, "gascompile", "cgroup_bytes")
    if group is None:
        return "Each contender ran in a process of its own."
    kills = sum(int(_number(row, name, "kills") or 0) for name in ("gascompile", "accelerate"))
    killed = f"; {kills} of them were killed at that limit and run again" if kills else ""
    return f"Both contenders ran in a process and a memory control group of {_size(group)}{killed}."


def _weights(shape: Any) -> str:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    values = [_number(shape, name) for name in names]
    if None in values:
        return "unknown size"
    vocabulary, width, inner, layers = (value or 0.0 for value in values)
    heads = _number(shape, "num_attention_heads") or 1.0
    shared = (_number(shape, "num_key_value_heads") or heads) / heads
    layer = 2 * width * width * (1 + shared) + 3 * width * inner
    return f"{4 * (2 * vocabulary * width + layers * layer) / 1e9:.1f} GB in float32"


def _steady_row(row: dict[str, Any]) -> list[str]:
    share = _number(row, "share_of_limit")
    return [
        _shown(_number(row, "tokens"), "{:.0f}"),
        _shown(_number(row, "gascompile", "median_s"), "{:.3f} s"),
        _shown(_number(row, "accelerate", "median_s"), "{:.3f} s"),
        _shown(_number(row, "speedup"), "{:.2f} x"),
        _shown(_number(row, "limit_s"), "{:.3f} s"),
        _shown(share, "{:.1%}"),
        _size(_number(row, "gascompile", "measured_peak_bytes")),
    ]


def _first_output(result: dict[str, Any]) -> str:
    first = result.get("first_output")
    return (
        f"First output, process start excluded: {_shown(_number(first, 'cold_s'), '{:.1f} s')} with an empty cache, "
        f"{_shown(_number(first, 'warm_s'), '{:.1f} s')} with the plan in the cache, "
        f"{_shown(_number(first, 'accelerate_s'), '{:.1f} s')} with accelerate."
    )


def _curve_row(row: dict[str, Any]) -> list[str]:
    moved = _get(row, "link_bytes")
    sizes = (
        [size for size in moved.values() if isinstance(size, int)]
        if isinstance(moved, dict)
        else None
    )
    return [
        str(row.get("budget", _MISSING)),
        _shown(_number(row, "median_s"), "{:.3f} s"),
        _shown(_number(row, "predicted_s"), "{:.3f} s"),
        _size(_number(row, "measured_peak_bytes")),
        _size(sum(sizes) if sizes is not None else None),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Fill in the README; 1 where there is no result, or where ``--check`` finds another table."""
    return fill_in(
        argv,
        about=__doc__,
        markers=(BEGIN, END),
        newest=newest_result,
        render=render,
        missing="no result in {}; measure with: make bench",
    )


if __name__ == "__main__":
    sys.exit(main())
