"""The plan cache and the weight store: reused when nothing changed, whole or absent, shared by processes."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile import passes
from gascompile.capture.fingerprint import fingerprint
from gascompile.core import serial
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks
from gascompile.weights import store
from tests.integration.net import BUDGET, Build, Net


def test_second_compile_runs_neither_capture_nor_solver(
    build: Build, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()(**inputs)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("ran again")

    monkeypatch.setattr("gascompile.capture.export.capture", refuse)
    monkeypatch.setattr("gascompile.passes.plan.make_plan.make_plan", refuse)
    monkeypatch.setattr("gascompile.machines.op_memory.annotate_memory", refuse)
    assert torch.equal(build()(**inputs), first)


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": "bf16", "fuse": "off"}, {"strategy": "all_streamed", "machine": "cpu-nvme"}],
    ids=str,
)
def test_another_budget_or_option_is_planned_of_the_kept_capture(
    net: Net,
    cache: Path,
    inputs: dict[str, torch.Tensor],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gascompile.compile(net, BUDGET, inputs, cache_dir=cache).close()
    fresh = cache.with_name("fresh")
    new = gascompile.compile(net, "20MiB", inputs, cache_dir=fresh, **options)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr("gascompile.capture.export.capture", refuse)
    kept = gascompile.compile(net, "20MiB", inputs, cache_dir=cache, **options)
    with kept, new:
        assert torch.equal(kept(**inputs), new(**inputs))
        found, wanted = (of.plan.workload for of in (kept, new))
        assert found.tensors == wanted.tensors
        assert [replace(op, time_s={}) for op in found.ops] == [
            replace(op, time_s={}) for op in wanted.ops
        ]
        net.norm.eps = 1e-3
        with pytest.raises(AssertionError, match="captured again"):
            kept(**inputs)


def test_plans_without_a_run_and_costs_are_made_of_the_kept_capture_too(
    net: Net, cache: Path, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(budget: str, cache_dir: Path) -> gascompile.Plan:
        return gascompile.plan(net, budget, "cpu-nvme", inputs, cache_dir=cache_dir)

    planned(BUDGET, cache)
    wanted = planned("20MiB", cache.with_name("fresh"))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr("gascompile.capture.export.capture", refuse)
    found = planned("20MiB", cache)
    assert (found.workload, found.steps) == (wanted.workload, wanted.steps)
    with gascompile.compile(net, BUDGET, inputs, cache_dir=cache, fuse="off") as compiled:
        assert torch.equal(compiled(**inputs), net(**inputs))
    net.norm.eps = 1e-3
    with pytest.raises(AssertionError, match="captured again"):
        planned("20MiB", cache)


class Scaled(nn.Module):
    """One of two models that differ in a constant."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.scale
        return y


def test_a_capture_under_the_name_of_another_is_not_used(cache: Path) -> None:
    models, x = (Scaled(2.0), Scaled(3.0)), torch.randn(2, 4)
    for model in models:
        gascompile.compile(model, "1MiB", (x,), cache_dir=cache).close()
    one, two = (cache / "captures").iterdir()
    shutil.rmtree(two)
    one.rename(two)
    for model in models:
        with gascompile.compile(model, "2MiB", (x,), cache_dir=cache) as compiled:
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("manifest.json", "deleted"),
        ("manifest.json", "truncated"),
        ("program.json", "garbage"),
        ("program.json", "truncated"),
        ("plan.json", "deleted"),
        ("held.safetensors", "truncated"),
    ],
)
def test_damaged_cache_entry_is_made_again(
    build: Build,
    cache: Path,
    inputs: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    file: str,
    damage: str,
) -> None:
    wanted = build()(**inputs)
    (entry,) = (cache / "plans").iterdir()
    raw = (entry / file).read_bytes()
    if damage == "deleted":
        (entry / file).unlink()
    else:
        (entry / file).write_bytes(
            raw[: len(raw) // 2] if damage == "truncated" else b"\x00garbage"
        )
    with caplog.at_level(logging.WARNING, logger="gascompile"):
        assert torch.equal(build()(**inputs), wanted)
    assert "planning again" in caplog.text
    caplog.clear()
    build()
    assert "planning again" not in caplog.text


def test_every_input_of_the_plan_changes_the_key(
    net: Net, cache: Path, inputs: dict[str, torch.Tensor]
) -> None:
    def entries() -> int:
        return len(list((cache / "plans").iterdir()))

    def compile_it(model: nn.Module, budget: str = BUDGET, **options: Any) -> None:
        known: dict[str, Any] = {"example_inputs": inputs, "cache_dir": cache}
        gascompile.compile(model, budget, **(known | options))

    changed = Net().eval()
    changed.layers[2] = nn.Linear(1024, 1024, bias=False)
    attribute = Net().eval()
    attribute.norm.eps = 1e-3
    variants: list[Callable[[], None]] = [
        lambda: compile_it(net),
        lambda: compile_it(net, "20MiB"),
        lambda: compile_it(net, mip_gap=0.2),
        lambda: compile_it(net, strategy="all_streamed"),
        lambda: compile_it(net, example_inputs={"x": torch.zeros(4, 1024)}),
        lambda: compile_it(changed),
        lambda: compile_it(attribute),
        lambda: compile_it(Net().train()),
    ]
    for count, variant in enumerate(variants, start=1):
        variant()
        assert entries() == count
    for variant in variants:
        variant()
    assert entries() == len(variants)


def test_code_that_was_edited_since_plans_anew(
    build: Build, cache: Path, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout changes under one version; what it made before is not used again."""
    build()
    before = fingerprint.made_by()
    (entry,) = (cache / "plans").iterdir()
    os.utime(passes.__file__, ns=(1, os.stat(passes.__file__).st_mtime_ns + 1))
    fingerprint.made_by.cache_clear()
    try:
        assert fingerprint.made_by() != before
        build()
        assert {entry} < set((cache / "plans").iterdir())
    finally:
        os.utime(passes.__file__, ns=(1, os.stat(passes.__file__).st_mtime_ns - 1))
        fingerprint.made_by.cache_clear()
    assert fingerprint.made_by() == before


def test_an_accelerator_that_grew_gets_a_plan_of_its_own(
    net: Net, cache: Path, inputs: dict[str, torch.Tensor]
) -> None:
    """What a run takes beside its budget has to fit into the accelerator, so its size is part of the key."""
    machine = resolve_machine("emulated", cache_dir=cache, read=read_blocks)
    sizes = [
        machine.with_place(replace(machine.tiers["gpu"], size_bytes=n))
        for n in (64 << 20, 128 << 20)
    ]
    for size in sizes:
        with gascompile.compile(
            net, BUDGET, example_inputs=inputs, cache_dir=cache, machine=size
        ) as compiled:
            assert compiled.plan.machine.tiers["gpu"].size_bytes == size.tiers["gpu"].size_bytes


def test_full_disk_is_found_before_writing(
    net: Net, cache: Path, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache)._replace(free=1000)
    monkeypatch.setattr("gascompile.weights.store.shutil.disk_usage", lambda path: usage)
    with pytest.raises(gascompile.StorageError, match=r"the weights need .*are free.*cache_dir="):
        gascompile.compile(net, BUDGET, example_inputs=inputs, cache_dir=cache)
    assert not list((cache / "store").glob("*safetensors*"))


def test_disk_that_fills_up_while_spilling(
    net: Net, cache: Path, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_file", full)
        with pytest.raises(gascompile.StorageError, match="the disk is full"):
            gascompile.compile(net, BUDGET, example_inputs=inputs, cache_dir=cache)
    assert [path.name for path in (cache / "store").iterdir()] == [".lock"]
    compiled = gascompile.compile(net, BUDGET, example_inputs=inputs, cache_dir=cache)
    assert torch.allclose(compiled(**inputs), net(**inputs), atol=1e-5)


def test_cache_that_cannot_keep_the_plan_costs_no_result(
    build: Build,
    inputs: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(path: Path, data: object) -> None:
        raise gascompile.StorageError(f"cannot write {path}: the disk is full")

    monkeypatch.setattr(serial, "write_atomic", full)
    assert build()(**inputs).shape == (2, 1024)
    assert "the plan is not kept" in caplog.text


def test_two_processes_fill_one_cache(
    checkpoint: Path, cache: Path, root: Path, inputs: dict[str, torch.Tensor], build: Build
) -> None:
    script = textwrap.dedent(
        f"""
        import torch, gascompile
        from tests.integration.net import Net, BUDGET
        torch.manual_seed(3)
        x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(4))
        model = Net().eval()
        compiled = gascompile.compile(model, BUDGET, example_inputs={{"x": x}}, cache_dir={str(cache)!r})
        with torch.no_grad():
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
        """
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=root, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(list((cache / "store").glob("*.safetensors"))) == 1
    assert len([p for p in (cache / "plans").iterdir() if not p.name.startswith(".")]) == 1
    assert not [p for p in (cache / "plans").iterdir() if p.name.startswith(".")]
