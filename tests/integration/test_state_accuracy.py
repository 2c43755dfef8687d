"""The benchmark of states in 8 bits at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import state_accuracy


def test_each_form_is_compared_with_float32(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert state_accuracy.main(["--toy", "-o", str(output)]) == 0
    found = json.loads(output.read_text())
    rows = {row["form"]: row for row in found["losses"]}
    assert set(rows) == set(state_accuracy.forms())
    assert rows["float32"]["mean_distance"] == 0
    assert all(0 < row["mean_distance"] < 0.1 for name, row in rows.items() if name != "float32")
    assert all(cost > 0 for cost in found["coding_ns_per_value"].values())


def test_dynamic_tables_are_those_of_a_tree_of_exponents() -> None:
    signed, unsigned = (state_accuracy.dynamic_table(signed=s) for s in (True, False))
    assert len(signed) == len(unsigned) == 256
    assert float(unsigned[0]) == 0
    assert float(unsigned.max()) == float(signed.max()) == 1
    assert torch.equal(signed[signed < 0].flip(0), -signed[(signed > 0) & (signed < 1)])
    assert int((unsigned > 0.1).sum()) == 129
    form = state_accuracy.by_table(unsigned)
    values = torch.rand(3, 256)
    assert float((form(values, 1) - values).abs().max()) < 0.9 / 128 / 2 + 1e-6
