"""The benchmark of weight forms: its arithmetic by hand, and a toy run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip("transformers")

from benchmarks import formats_worker
from benchmarks.formats import FORMS, TOKENS, TOY_SHAPE, main, summarise, write_models
from tests.in_process import run_here


def measured(factor: float, moved_bytes: int) -> dict[str, Any]:
    rows = [
        {"tokens": tokens, "times_s": [factor, 3 * factor], "moved_bytes": moved_bytes}
        for tokens in TOKENS
    ]
    return {"rows": rows, "size_bytes": {}, "largest_weight_error": 0.0}


def test_speeds_are_of_medians_over_all_rounds() -> None:
    found = {
        ("fp32", "1GiB"): [measured(4.0, 400), measured(8.0, 400)],
        ("bf16", "1GiB"): [measured(2.0, 200)],
        ("int8", "1GiB"): [measured(1.0, 100)],
        ("int4", "1GiB"): [measured(0.5, 0)],
    }
    rows = summarise(found, ("1GiB",))
    assert [(row["tokens"], row["form"]) for row in rows] == [(t, f) for t in TOKENS for f in FORMS]
    first = {row["form"]: row for row in rows if row["tokens"] == TOKENS[0]}
    assert first["fp32"]["times_s"] == [4.0, 12.0, 8.0, 24.0]
    assert first["fp32"]["median_s"] == 10.0
    assert first["bf16"]["speedup_over_fp32"] == 2.5
    assert first["int8"]["speedup_over_bf16"] == 2.0
    assert first["int8"]["bytes_of_bf16"] == 0.5
    none = summarise({key: [measured(1.0, 0)] for key in found}, ("1GiB",))
    assert none[0]["bytes_of_bf16"] is None


def test_both_checkpoints_hold_the_same_values(tmp_path: Path) -> None:
    folders = write_models(tmp_path, {**TOY_SHAPE, "vocab_size": 64})
    narrow, wide = (
        {n: t for file in folders[d].glob("*.safetensors") for n, t in load_file(file).items()}
        for d in ("bf16", "fp32")
    )
    assert narrow.keys() == wide.keys()
    assert {str(tensor.dtype) for tensor in narrow.values()} == {"torch.bfloat16"}
    assert all(bool((narrow[name].float() == wide[name]).all()) for name in wide)
    assert json.loads((folders["fp32"] / "config.json").read_text())["dtype"] == "float32"


def test_a_toy_run_moves_fewer_bytes_and_says_what_that_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    run_here(monkeypatch, "benchmarks.formats_worker", formats_worker.main)
    output = tmp_path / "formats.json"
    result = main(["--toy", "--rounds", "1", "--runs", "1", "-o", str(output)])
    assert json.loads(output.read_text()) == result
    by_form = {row["form"]: row for row in result["rows"] if row["tokens"] == 1}
    for row in result["rows"]:
        assert row["peak_bytes"] <= row["budget_bytes"]
        if row["form"] in ("fp32", "bf16"):
            assert row["largest_difference"] <= 1e-4 * row["largest_logit"]
    assert by_form["bf16"]["moved_bytes"] <= by_form["fp32"]["moved_bytes"] / 2
    assert 0 < by_form["int8"]["relative_error"] < 0.05
    assert by_form["int8"]["relative_error"] < by_form["int4"]["relative_error"] < 0.5
    assert by_form["int8"]["largest_weight_error"] < 0.02
    assert result["environment"]["versions"]["torch"]
