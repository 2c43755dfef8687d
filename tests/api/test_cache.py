"""Upkeep of the cache: listing, removal by key, collection of what is of no use."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gascompile
from gascompile.api.cache_upkeep import ItemKind, collect, items
from gascompile.cli import app
from gascompile.cost_models.measure.disk import PROBE_PREFIX
from gascompile.machines.resolve import preset

_HOUR_S = 3600.0


class _Chain(nn.Module):
    """Three matrices, other ones per seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """Return a cache with two plans, each with a capture and spilled weights of its own."""
    for seed in range(2):
        rows = torch.zeros(seed + 1, 64)
        with gascompile.compile(
            _Chain(seed), "64KiB", (rows,), machine=preset("cpu-nvme"), cache_dir=tmp_path / "c"
        ) as compiled:
            compiled(rows)
    return tmp_path / "c"


def _age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def _kinds(cache_dir: Path) -> list[str]:
    return [item.kind.value for item in items(cache_dir)]


def _cli(cache_dir: Path, *args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["cache", *args, "--json", "--cache-dir", str(cache_dir)])
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def test_ls_lists_plans_and_weights(cache_dir: Path) -> None:
    data = _cli(cache_dir, "ls")
    assert [item["kind"] for item in data["items"]] == [
        *["plan"] * 2,
        *["capture"] * 2,
        *["weights"] * 2,
    ]
    assert all(item["ok"] for item in data["items"])
    assert data["total_bytes"] == sum(item["bytes"] for item in data["items"])
    shown = CliRunner().invoke(app, ["cache", "ls", "--cache-dir", str(cache_dir)]).stdout
    assert "_Chain" in shown
    assert "6 entries" in shown


def test_what_ranks_keep_is_listed_and_goes_with_age(tmp_path: Path) -> None:
    names = ["exchanges-0a", "division-1b", "stage-2c"]
    (tmp_path / "ranks").mkdir()
    for name in names:
        (tmp_path / "ranks" / f"{name}.json").write_text("{}")
    assert {item.key for item in items(tmp_path)} == set(names)
    assert {item.kind for item in items(tmp_path)} == {ItemKind.RANKS}
    _age(tmp_path / "ranks" / "stage-2c.json", 40 * 24 * _HOUR_S)
    removed = _cli(tmp_path, "gc", "--older-than", "30d")["removed"]
    assert [item["key"] for item in removed] == ["stage-2c"]
    assert {item.key for item in items(tmp_path)} == set(names[:2])
    assert len(collect(tmp_path, max_size_bytes=2)) == 1


def test_an_empty_cache(tmp_path: Path) -> None:
    assert _cli(tmp_path / "none", "ls")["items"] == []
    assert _cli(tmp_path / "none", "gc")["removed"] == []
    assert not (tmp_path / "none").exists()


def test_rm_by_prefix(cache_dir: Path) -> None:
    first, _, capture, *_ = items(cache_dir)
    removed = _cli(cache_dir, "rm", first.key[:10], capture.key)["removed"]
    assert [item["key"] for item in removed] == [first.key, capture.key]
    assert _kinds(cache_dir) == ["plan", "capture", "weights", "weights"]
    error = _cli(cache_dir, "rm", first.key, code=2)["error"]
    assert "no entry begins" in error["message"]
    assert _kinds(cache_dir) == ["plan", "capture", "weights", "weights"]


def test_gc_leaves_a_healthy_young_cache_alone(cache_dir: Path) -> None:
    assert collect(cache_dir) == []
    assert len(items(cache_dir)) == 6


def test_gc_removes_damaged_plans_then_their_weights_when_old(cache_dir: Path) -> None:
    plan = items(cache_dir)[0]
    (Path(plan.path) / "plan.json").write_text("{}")
    assert not items(cache_dir)[0].ok
    assert [item.key for item in collect(cache_dir)] == [plan.key]
    unused = [item for item in items(cache_dir) if not item.ok]
    assert [item.kind for item in unused] == [ItemKind.WEIGHTS]
    # Younger than an hour they may belong to a process that is about to write its plan.
    assert collect(cache_dir) == []
    _age(Path(unused[0].path), 2 * _HOUR_S)
    assert collect(cache_dir, keep_weights=True) == []
    assert [item.key for item in collect(cache_dir)] == [unused[0].key]
    assert _kinds(cache_dir) == ["plan", "capture", "capture", "weights"]


def test_gc_by_age_and_by_size(cache_dir: Path) -> None:
    newest, oldest = (item for item in items(cache_dir) if item.kind == ItemKind.PLAN)
    _age(Path(oldest.path), 40 * 24 * _HOUR_S)
    _age(
        Path(next(i.path for i in items(cache_dir) if i.kind == ItemKind.CAPTURE)),
        40 * 24 * _HOUR_S,
    )
    for item in items(cache_dir):
        if item.kind == ItemKind.WEIGHTS:
            _age(Path(item.path), 2 * _HOUR_S)
    kept_bytes = sum(item.size_bytes for item in items(cache_dir))
    assert _cli(cache_dir, "gc", "--max-size", str(kept_bytes))["removed"] == []
    removed = _cli(cache_dir, "gc", "--older-than", "30d")["removed"]
    assert {item["kind"] for item in removed} == {"plan", "capture", "weights"}
    assert removed[0]["key"] == oldest.key
    assert items(cache_dir)[0].key == newest.key
    removed = _cli(cache_dir, "gc", "--max-size", "1KiB")["removed"]
    assert len(removed) == 3
    assert items(cache_dir) == []
    assert (
        "cannot read the age"
        in _cli(cache_dir, "gc", "--older-than", "old", code=2)["error"]["message"]
    )


def test_gc_removes_leftovers_of_killed_writers(cache_dir: Path) -> None:
    store, plans = cache_dir / "store", cache_dir / "plans"
    # The last is what a measurement of the drive reads.
    old = [store / ".abc.safetensors.123", plans / ".abc.xyz", cache_dir / f"{PROBE_PREFIX}abc"]
    old[0].write_bytes(b"half")
    old[1].mkdir()
    old[2].write_bytes(b"noise")
    (old[1] / "plan.json").write_text("half")
    young = store / ".def.safetensors.456"
    young.write_bytes(b"half")
    for path in old:
        _age(path, 2 * _HOUR_S)
    locks = [store / ".lock", cache_dir / ".machine.lock"]
    for path in locks:
        path.touch()
        _age(path, 2 * _HOUR_S)
    removed = collect(cache_dir)
    assert {item.path for item in removed} == {str(path) for path in old}
    assert not any(path.exists() for path in old)
    assert young.exists()
    assert all(path.exists() for path in locks)


def test_a_removed_plan_is_planned_again(cache_dir: Path) -> None:
    for item in items(cache_dir):
        _cli(cache_dir, "rm", item.key)
    rows = torch.zeros(1, 64)
    model = _Chain(0)
    with gascompile.compile(
        model, "64KiB", (rows,), machine=preset("cpu-nvme"), cache_dir=cache_dir
    ) as compiled:
        torch.testing.assert_close(compiled(rows), model(rows).detach())
    assert _kinds(cache_dir) == ["plan", "capture", "weights"]


def test_compiled_code_is_listed_removed_and_collected_by_age(cache_dir: Path) -> None:
    names = ["kernels/one", "kernels/two", "native/pages"]
    for name in names:
        path = cache_dir / f"{name}.so"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"code")
    record = cache_dir / "kernels" / "one.json"
    record.write_text("{}")
    assert _kinds(cache_dir) == [
        *["plan"] * 2,
        *["capture"] * 2,
        *["weights"] * 2,
        *["code"] * 3,
    ]
    _cli(cache_dir, "rm", "one")
    assert not record.exists()
    _age(cache_dir / "kernels" / "two.so", 40 * 24 * _HOUR_S)
    removed = _cli(cache_dir, "gc", "--older-than", "30d")["removed"]
    assert [item["key"] for item in removed] == ["two"]
    assert collect(cache_dir) == []
    assert (cache_dir / "native" / "pages.so").exists()
