"""Bad input and faults: a typed error that says what to do, nothing lost, nothing half-written."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gascompile
from gascompile import serial, store


class Net(nn.Module):
    """Eight layers of 4 MiB: enough to stream, small enough to be quick."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.norm = nn.LayerNorm(1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        normed: torch.Tensor = self.norm(x)
        return normed


BUDGET = "16MiB"


@pytest.fixture
def net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 1024, generator=torch.Generator().manual_seed(4))}


@pytest.fixture
def checkpoint(net: Net, tmp_path: Path) -> Path:
    """Return a folder of two shards with an index, as Hugging Face writes them."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    names = list(net.state_dict())
    weight_map = {}
    for i, part in enumerate((names[:9], names[9:])):
        file = f"model-{i}.safetensors"
        save_file({name: net.state_dict()[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def build(
    checkpoint: Path, cache: Path, inputs: dict[str, torch.Tensor]
) -> Callable[[], gascompile.CompiledModel]:
    def compile_it() -> gascompile.CompiledModel:
        with torch.device("meta"):
            skeleton = Net().eval()
        return gascompile.compile(
            skeleton, BUDGET, example_inputs=inputs, checkpoint=checkpoint, cache_dir=cache
        )

    return compile_it


Build = Callable[[], gascompile.CompiledModel]


def rewrite(shard: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)


# ------------------------------------------------------------ the checkpoint


def test_missing_shard(checkpoint: Path, build: Build) -> None:
    (checkpoint / "model-1.safetensors").unlink()
    with pytest.raises(
        gascompile.CheckpointError, match=r"names the shard model-1\.safetensors.*download"
    ):
        build()


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_shard(checkpoint: Path, build: Build, keep: int) -> None:
    shard = checkpoint / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(gascompile.CheckpointError, match=r"truncated|corrupt"):
        build()


def test_corrupt_header(checkpoint: Path, build: Build) -> None:
    shard = checkpoint / "model-0.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[20:24] = b"\xff\xfe\x00{"
    shard.write_bytes(raw)
    with pytest.raises(gascompile.CheckpointError, match=r"model-0\.safetensors has a corrupt"):
        build()


def test_header_whose_entries_are_no_entries(checkpoint: Path, build: Build) -> None:
    header = json.dumps({"layers.0.weight": 7}).encode()
    (checkpoint / "model-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(gascompile.CheckpointError, match=r"layers\.0\.weight"):
        build()


def test_wrong_shape(checkpoint: Path, build: Build) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.weight"] = torch.zeros(1024, 512)

    rewrite(checkpoint / "model-0.safetensors", change)
    with pytest.raises(
        gascompile.CheckpointError,
        match=r"'layers.0.weight' has the shape \[1024, 512\].*\[1024, 1024\]",
    ):
        build()


def test_wrong_dtype(checkpoint: Path, build: Build) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.weight"] = tensors["layers.0.weight"].half()

    rewrite(checkpoint / "model-0.safetensors", change)
    with pytest.raises(
        gascompile.CheckpointError, match=r"dtype float16.*needs float32.*model\.to"
    ):
        build()


def test_missing_weight(checkpoint: Path, build: Build) -> None:
    rewrite(
        checkpoint / "model-0.safetensors", lambda tensors: tensors.__delitem__("layers.1.bias")
    )
    with pytest.raises(gascompile.CheckpointError, match=r"lacks 1 weights.*'layers\.1\.bias'"):
        build()


def test_extra_weight(checkpoint: Path, build: Build) -> None:
    rewrite(
        checkpoint / "model-0.safetensors",
        lambda tensors: tensors.update({"layers.99.bias": torch.zeros(3)}),
    )
    with pytest.raises(
        gascompile.CheckpointError,
        match=r"holds 1 weights that the model does not have.*'layers\.99\.bias'",
    ):
        build()


def test_no_checkpoint_for_a_meta_model(cache: Path, inputs: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        skeleton = Net().eval()
    with pytest.raises(gascompile.CheckpointError, match="pass checkpoint="):
        gascompile.compile(skeleton, BUDGET, example_inputs=inputs, cache_dir=cache)


def test_file_replaced_after_planning(
    checkpoint: Path, build: Build, inputs: dict[str, torch.Tensor]
) -> None:
    compiled = build()
    compiled(**inputs)
    shard = checkpoint / "model-1.safetensors"
    copy = checkpoint / "new"
    shutil.copy(shard, copy)
    os.utime(copy, ns=(1, 1))
    copy.replace(shard)
    with pytest.raises(gascompile.StorageError, match=r"model-1\.safetensors"):
        compiled(**inputs)


# ------------------------------------------------------------ inputs of a call


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(3, 1024), r"'x' has the shape \[3, 1024\], the plan was made for \[2, 1024\]"),
        (torch.zeros(2, 1024, 1), r"'x' has the shape \[2, 1024, 1\]"),
        (torch.zeros(2, 1024, dtype=torch.float64), "'x' has the dtype torch.float64"),
        (torch.zeros(2, 1024, device="meta"), "'x' is on 'meta'"),
        (1.0, "'x' is a float"),
        ([torch.zeros(2, 1024)], "structure"),
    ],
)
def test_inputs_that_were_not_planned(build: Build, bad: Any, message: str) -> None:
    with pytest.raises(gascompile.PlanMismatchError, match=message):
        build()(bad)


# ------------------------------------------------------------ the cache and the store


def test_second_compile_runs_neither_capture_nor_solver(
    build: Build, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()(**inputs)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("ran again")

    monkeypatch.setattr("torch.export.export", refuse)
    monkeypatch.setattr("gascompile.pipeline.make_plan", refuse)
    monkeypatch.setattr("gascompile.pipeline.annotate", refuse)
    assert torch.equal(build()(**inputs), first)


@pytest.mark.parametrize("file", ["manifest.json", "program.json", "plan.json", "held.safetensors"])
@pytest.mark.parametrize("damage", ["garbage", "truncated", "deleted"])
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


def test_full_disk_is_found_before_writing(
    net: Net, cache: Path, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(cache)._replace(free=1000)
    monkeypatch.setattr("gascompile.store.shutil.disk_usage", lambda path: usage)
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
        from tests.integration.test_faults import Net, BUDGET
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


# ------------------------------------------------------------ a run that is disturbed


def run_often(compiled: gascompile.CompiledModel, inputs: dict[str, torch.Tensor]) -> None:
    for _ in range(3):
        compiled(**inputs)


def test_read_error_in_the_middle_of_a_run(
    build: Build, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = build()
    wanted = compiled(**inputs)
    real, calls = os.preadv, 0

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(
            gascompile.StorageError, match=r"layers\..*(Input/output error).*check the drive"
        ):
            run_often(compiled, inputs)
    for _ in range(2):
        assert torch.equal(compiled(**inputs), wanted)


def test_interrupt_in_a_run_leaves_the_model_usable(
    build: Build, inputs: dict[str, torch.Tensor]
) -> None:
    compiled = build()
    wanted = compiled(**inputs)
    interrupted = 0
    for delay_s in (0.0005, 0.001, 0.002, 0.004, 0.008):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            for _ in range(50):
                compiled(**inputs)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert torch.equal(compiled(**inputs), wanted)
    assert interrupted == 5


# ------------------------------------------------------------ bundles


@pytest.fixture
def bundle(build: Build, tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    build().save(folder)
    return folder


def test_bundle_runs_without_model_solver_or_capture(
    bundle: Path, build: Build, inputs: dict[str, torch.Tensor], root: Path, tmp_path: Path
) -> None:
    wanted = build()(**inputs)
    save_file({"x": inputs["x"], "wanted": wanted}, tmp_path / "io.safetensors")
    script = textwrap.dedent(
        f"""
        import sys, torch, gascompile
        from safetensors.torch import load_file
        io = load_file({str(tmp_path / "io.safetensors")!r})
        compiled = gascompile.load({str(bundle)!r})
        for _ in range(2):
            assert torch.equal(compiled(io["x"]), io["wanted"])
        assert "pulp" not in sys.modules and "transformers" not in sys.modules
        """
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)


def edit_plan(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the plan of a bundle and make the checksum right again."""
    plan = json.loads((bundle / "plan.json").read_text())
    change(plan)
    serial.write_atomic(bundle / "plan.json", json.dumps(plan))
    manifest = json.loads((bundle / "manifest.json").read_text())
    from gascompile.bundle import _digest

    manifest["files"]["plan.json"] = _digest((bundle / "plan.json").read_bytes())
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_bundle_of_another_version(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["versions"]["torch"] = "1.0"
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        gascompile.PlanMismatchError, match=r"made with torch 1\.0.*compile the model again"
    ):
        gascompile.load(bundle)


def test_bundle_of_another_machine(bundle: Path, inputs: dict[str, torch.Tensor]) -> None:
    edit_plan(bundle, lambda plan: plan["machine"].update(name="somebody else's"))
    with pytest.raises(gascompile.PlanMismatchError, match=r"somebody else's.*any_machine=True"):
        gascompile.load(bundle)
    assert gascompile.load(bundle, any_machine=True)(**inputs).shape == (2, 1024)


def test_bundle_whose_plan_is_for_another_graph(bundle: Path) -> None:
    edit_plan(bundle, lambda plan: plan["ops"][3].update(name="other"))
    with pytest.raises((gascompile.PlanMismatchError, gascompile.PlanVerificationError)):
        gascompile.load(bundle)


def test_bundle_whose_plan_breaks_a_dependency(bundle: Path) -> None:
    def drop_a_wait(plan: dict[str, Any]) -> None:
        plan["steps"].remove(next(s for s in plan["steps"] if s["step"] == "wait"))

    edit_plan(bundle, drop_a_wait)
    with pytest.raises(gascompile.PlanVerificationError):
        gascompile.load(bundle)


def test_damaged_bundle(bundle: Path) -> None:
    raw = (bundle / "program.json").read_bytes()
    (bundle / "program.json").write_bytes(raw.replace(b"tanh", b"sinh"))
    with pytest.raises(gascompile.FormatError, match="checksum differs"):
        gascompile.load(bundle)


def test_bundle_calls_nothing_but_ops(bundle: Path) -> None:
    raw = (bundle / "program.json").read_text()
    for target in ("os.system", "builtins.eval", "operator.attrgetter", "aten.nothing.default"):
        program = json.loads(raw)
        program["nodes"][-1]["target"] = target
        serial.write_atomic(bundle / "program.json", json.dumps(program))
        manifest = json.loads((bundle / "manifest.json").read_text())
        from gascompile.bundle import _digest

        manifest["files"]["program.json"] = _digest((bundle / "program.json").read_bytes())
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(gascompile.FormatError, match="not registered"):
            gascompile.load(bundle)


def test_bundle_whose_weights_changed(bundle: Path, checkpoint: Path) -> None:
    shard = checkpoint / "model-0.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(gascompile.StorageError, match=r"model-0\.safetensors is not the one"):
        gascompile.load(bundle)


def test_bundle_whose_weights_were_touched_or_moved(
    bundle: Path, checkpoint: Path, inputs: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    wanted = gascompile.load(bundle)(**inputs)
    os.utime(checkpoint / "model-0.safetensors")
    assert torch.equal(gascompile.load(bundle)(**inputs), wanted)
    moved = tmp_path / "moved"
    checkpoint.rename(moved)
    with pytest.raises(gascompile.StorageError, match="pass checkpoint="):
        gascompile.load(bundle)
    assert torch.equal(gascompile.load(bundle, checkpoint=moved)(**inputs), wanted)
