"""Bundles: run elsewhere without model, solver or capture; refused when anything does not match."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gascompile
from gascompile.core import serial
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.files import exchange
from tests.fuzz.mutate import sign
from tests.integration.net import Build
from tests.training.runs import MACHINE


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
        compiled = gascompile.load({str(bundle)!r}, allow_code=True)  # fused, if it is, as there
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
    from gascompile.core.serial import raw_digest

    manifest["files"]["plan.json"] = raw_digest((bundle / "plan.json").read_bytes())
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
        from gascompile.core.serial import raw_digest

        manifest["files"]["program.json"] = raw_digest((bundle / "program.json").read_bytes())
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(
            gascompile.FormatError, match=r"none of those that data may call|not registered"
        ):
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


class Rows(nn.Module):
    """Two ops that may refuse values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4)

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add rows to ``x``."""
        return torch.maximum(self.rows(index), x)


def test_what_an_op_of_a_bundle_refuses_is_a_typed_error(cache: Path, tmp_path: Path) -> None:
    index, x, wrong = torch.arange(3), torch.randn(3, 4), torch.tensor([1, 2, 77])
    folder, model = tmp_path / "rows", Rows().eval()
    with gascompile.compile(model, None, (index, x), cache_dir=cache, fuse="off") as compiled:
        compiled.save(folder)
        with pytest.raises(IndexError):
            compiled(wrong, x)
    with gascompile.load(folder, cache_dir=cache) as loaded:
        for _ in range(2):
            with pytest.raises(UnsupportedOpError, match=r"op 0 'embedding'.*IndexError"):
                loaded(wrong, x)
            assert torch.equal(loaded(index, x), model(index, x))
    program = (folder / "program.json").read_text()
    serial.write_atomic(
        folder / "program.json", program.replace("aten.maximum.default", "aten.bitwise_or.Tensor")
    )
    sign(folder)
    with (
        gascompile.load(folder, cache_dir=cache) as loaded,
        pytest.raises(UnsupportedOpError, match=r"'maximum'.*bitwise_or.*not implemented"),
    ):
        loaded(index, x)


def test_a_bundle_takes_the_place_of_a_bundle_alone(cache: Path, tmp_path: Path) -> None:
    folder, file, model, x = tmp_path / "mine", tmp_path / "a", nn.Linear(8, 8), torch.randn(2, 8)
    folder.mkdir()
    for path in (file, folder / "notes.txt"):
        path.write_text("precious")
    with gascompile.compile(model, None, (x,), cache_dir=cache, fuse="off") as compiled:
        for place, fault in ((folder, r"notes\.txt.*would be lost"), (file, "another name")):
            with pytest.raises(gascompile.StorageError, match=fault):
                compiled.save(place)
        assert file.read_text() == (folder / "notes.txt").read_text() == "precious"
        (folder / "notes.txt").unlink()
        compiled.save(folder)
    for _ in range(2):
        # It has weights of its own in there, which it keeps.
        with gascompile.load(folder, cache_dir=cache) as loaded:
            loaded.save(folder)
            assert torch.equal(loaded(x), model(x))
    (folder / "weights" / "notes.txt").write_text("precious")
    with (
        gascompile.load(folder, cache_dir=cache) as loaded,
        pytest.raises(gascompile.StorageError, match=r"weights/notes\.txt.*would be lost"),
    ):
        loaded.save(folder)


def test_folders_are_exchanged_at_once(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / path.name).touch()
    assert exchange(one, other)
    assert (one / "other").exists()
    assert (other / "one").exists()
    with pytest.raises(FileNotFoundError):
        exchange(one, tmp_path / "nothing")
    assert (one / "other").exists()


def test_embeddings_of_limited_norm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 4)).eval()
    twin, tokens = copy.deepcopy(model), torch.tensor([[1, 2, 9]])
    with gascompile.compile(
        model, "1MiB", (tokens,), machine=MACHINE, cache_dir=tmp_path / "cache"
    ) as compiled:
        compiled.save(tmp_path / "bundle")
    with (
        gascompile.load(tmp_path / "bundle", any_machine=True, cache_dir=tmp_path) as loaded,
        torch.no_grad(),
    ):
        for given in (tokens, tokens + 0, tokens.flip(1) - 1):
            assert torch.equal(loaded(given), twin(given))
        with pytest.raises(UnsupportedOpError, match="out of range"):
            loaded(torch.tensor([[0, 10, 1]]))
