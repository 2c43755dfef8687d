"""Fused ops in whole compiles: eager's results within rounding, the promised memory, and code only from here."""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

import gascompile
from gascompile import kernel_store
from gascompile.bundle import _digest
from tests import zoo
from tests.integration.test_models import eager, flat_run_bytes

ALWAYS: dict[str, Any] = {"fuse_runs": math.inf}


@pytest.fixture(scope="module")
def kernels(measured_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder that the tests of this module share, so that each kernel is compiled once."""
    folder = tmp_path_factory.mktemp("kernels")
    shutil.copytree(measured_cache / "machine", folder / "machine")
    return folder


class Gated(nn.Module):
    """Layers with a norm, a gate and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 256) for _ in range(4))
        self.norm = nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            a, b = layer(self.norm(x)).chunk(2, dim=-1)
            x = x + torch.tanh(a * 1.5 + 0.1) * torch.sigmoid(b)
        return x


@pytest.fixture
def gated() -> Gated:
    torch.manual_seed(5)
    return Gated().eval()


@pytest.fixture
def rows() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(3, 128, generator=torch.Generator().manual_seed(6))}


def assert_close(outputs: Any, expected: list[Any]) -> None:
    for value, wanted in zip(pytree.tree_leaves(outputs), expected, strict=True):
        if isinstance(wanted, torch.Tensor) and wanted.is_floating_point() and wanted.numel():
            scale = float(wanted.abs().max())
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5 * scale)
            assert value.stride() == wanted.stride()
        elif isinstance(wanted, torch.Tensor):
            assert torch.equal(value, wanted)


@pytest.mark.parametrize("name", ["llama", "t5", "mamba2"])
def test_results_and_memory_of_fused_models(name: str, kernels: Path) -> None:
    model, inputs = zoo.make(name)
    expected = eager(model, inputs)
    full = gascompile.plan(model, example_inputs=inputs, cache_dir=kernels).peak_bytes["cpu"]
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, example_inputs=inputs, cache_dir=kernels)
    for budget in (full, max(error.value.required_bytes, full // 2)):
        with gascompile.compile(
            model, budget, example_inputs=inputs, cache_dir=kernels, **ALWAYS
        ) as compiled:
            assert compiled.fused is not None
            assert compiled.fused.num_ops > compiled.fused.num_segments > 0
            for _ in range(2):
                assert_close(compiled(**inputs), expected)
            report, plan = compiled.last_run, compiled.plan
            assert report is not None
            assert report.peak_bytes["cpu"] <= plan.peak_bytes["cpu"] <= budget
            outside = plan.peak_bytes["cpu"] - plan.arena_bytes["cpu"]
            outside -= sum(tensor.nbytes for tensor in compiled.states.values())
            assert flat_run_bytes(compiled, inputs) <= outside


def test_equal_layers_share_a_kernel_and_reduced_types_stay_within_rounding(
    gated: Gated, rows: dict[str, torch.Tensor], kernels: Path
) -> None:
    halved = gated.to(torch.bfloat16)
    x = rows["x"].to(torch.bfloat16)
    with gascompile.compile(halved, None, (x,), cache_dir=kernels, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_kernels < compiled.fused.num_segments
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), halved(x), rtol=0.02, atol=0.02)


def test_off_and_too_few_runs_are_bit_identical_to_eager(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path
) -> None:
    (wanted,) = eager(gated, rows)
    with gascompile.compile(gated, None, rows, cache_dir=cache, fuse="off") as compiled:
        assert compiled.fused is None
        assert torch.equal(compiled(**rows), wanted)
    with gascompile.compile(gated, None, rows, cache_dir=cache, fuse_runs=1) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops == 0
        assert "raise fuse_runs" in compiled.fused.reason
        assert torch.equal(compiled(**rows), wanted)
    assert not kernel_store.folder_of(cache).exists()


def test_kernels_that_are_there_are_used_by_other_plans(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path
) -> None:
    gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS).close()
    with gascompile.compile(gated, "64MiB", rows, cache_dir=cache, fuse_runs=0) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 0
        assert compiled.fused.compile_s == 0
        assert_close(compiled(**rows), eager(gated, rows))


def test_inputs_that_lie_otherwise_in_memory(gated: Gated, kernels: Path) -> None:
    x = torch.randn(3, 128)
    other = torch.randn(128, 3).t()
    with gascompile.compile(gated, None, (x,), cache_dir=kernels, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 0
        assert_close(compiled(other), eager(gated, {"x": other}))


def test_without_a_compiler_ops_run_one_by_one(
    gated: Gated,
    rows: dict[str, torch.Tensor],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    for _ in range(2):
        with (
            caplog.at_level(logging.WARNING, logger="gascompile"),
            gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled,
        ):
            assert compiled.fused is not None
            assert compiled.fused.num_ops == 0
            assert "no C++ compiler '/nowhere/g++'" in compiled.fused.reason
            assert torch.equal(compiled(**rows), eager(gated, rows)[0])
    # The plan is kept, with its reason; it is made again where there is a compiler.
    assert len([r for r in caplog.records if "not fused" in r.getMessage()]) == 1
    monkeypatch.delenv("CXX")
    with gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 0
        assert_close(compiled(**rows), eager(gated, rows))


def test_a_compiler_that_fails_leaves_ops_one_by_one(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "false")
    with gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.reason.startswith("'false' failed")
        assert torch.equal(compiled(**rows), eager(gated, rows)[0])


def test_dynamic_shapes_stay_unfused(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path
) -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    with gascompile.compile(
        gated, None, rows, dynamic_shapes={"x": {0: batch}}, cache_dir=cache, **ALWAYS
    ) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.num_ops == 0
        assert torch.equal(compiled(**rows), eager(gated, rows)[0])


NO_COMPILER = """
import os, subprocess, sys
os.environ["PATH"] = ""
os.environ["GASCOMPILE_CACHE_DIR"] = {cache!r}
import torch, gascompile
from safetensors.torch import load_file

class Refuse:
    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.startswith(self.names):
            raise AssertionError(f"imports {{name}}")

def refuse(*args, **kwargs):
    raise AssertionError(f"starts {{args}}")

def no_compiler(*names):
    subprocess.Popen.__init__ = refuse
    sys.meta_path.insert(0, Refuse(*names))
    assert not [name for name in sys.modules if name.startswith(names)]

"""


def in_a_process(cache: Path, root: Path, code: str) -> None:
    script = NO_COMPILER.format(cache=str(cache)) + textwrap.dedent(code)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)


def test_a_second_process_compiles_nothing(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path, root: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    with gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled:
        assert compiled.fused is not None
        assert compiled.fused.compile_s > 0
        save_file({"x": rows["x"], "wanted": compiled(**rows)}, tmp_path / "io.safetensors")
        save_file(gated.state_dict(), tmp_path / "weights.safetensors")
        compiled.save(bundle)
    same = f"""
        io = load_file({str(tmp_path / "io.safetensors")!r})
        assert torch.equal(compiled(x=io["x"]), io["wanted"])
        assert compiled.fused.num_ops > 0 and compiled.fused.compile_s == 0, compiled.fused
        """
    in_a_process(
        cache,
        root,
        f"""
        no_compiler("torch._inductor", "torch._dynamo.")
        compiled = gascompile.load({str(bundle)!r})
        {same}""",
    )
    in_a_process(
        cache,
        root,
        f"""
        from tests.integration.test_fusion import ALWAYS, Gated
        no_compiler("torch._inductor.graph", "torch._inductor.codegen.cpp")
        model = Gated().eval()
        model.load_state_dict(load_file({str(tmp_path / "weights.safetensors")!r}))
        x = {{"x": torch.zeros(3, 128)}}
        compiled = gascompile.compile(model, None, x, cache_dir={str(cache)!r}, **ALWAYS)
        {same}""",
    )


@pytest.fixture
def bundle(gated: Gated, rows: dict[str, torch.Tensor], kernels: Path, tmp_path: Path) -> Path:
    """Return a bundle with kernels that were compiled by somebody whose cache is ``kernels``."""
    with gascompile.compile(gated, None, rows, cache_dir=kernels, **ALWAYS) as compiled:
        compiled.save(tmp_path / "bundle")
    return tmp_path / "bundle"


def test_code_of_unknown_origin_is_not_run(
    bundle: Path,
    gated: Gated,
    rows: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="gascompile"), gascompile.load(bundle) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops == 0
        assert "trust_kernels=True" in loaded.fused.reason
        assert torch.equal(loaded(**rows), eager(gated, rows)[0])
    assert len([r for r in caplog.records if "one by one" in r.getMessage()]) == 1
    with gascompile.load(bundle, trust_kernels=True) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops > 0
        assert_close(loaded(**rows), eager(gated, rows))


@pytest.mark.parametrize("suffix", ["so", "json"])
def test_damaged_kernels_are_refused(bundle: Path, suffix: str) -> None:
    (file,) = bundle.glob(f"kernels-*.{suffix}")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(gascompile.FormatError, match="checksum differs"):
        gascompile.load(bundle, trust_kernels=True)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][file.name] = _digest(bytes(raw))
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(gascompile.FormatError, match=r"kernels .* are damaged"):
        gascompile.load(bundle, trust_kernels=True)


def test_kernels_for_another_processor_are_not_run(
    bundle: Path, gated: Gated, rows: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gascompile.fusion_build._processor_features", lambda: "older")
    with gascompile.load(bundle, trust_kernels=True) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops == 0
        assert "were made for processor" in loaded.fused.reason
        assert torch.equal(loaded(**rows), eager(gated, rows)[0])


def test_damaged_kernels_of_the_store_are_compiled_again(
    gated: Gated, rows: dict[str, torch.Tensor], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS).close()
    (file,) = kernel_store.folder_of(cache).glob("*.so")
    file.write_bytes(file.read_bytes()[:100])
    with gascompile.compile(gated, "64MiB", rows, cache_dir=cache, **ALWAYS) as compiled:
        assert_close(compiled(**rows), eager(gated, rows))
        assert compiled.fused is not None
        assert compiled.fused.num_ops > 0
    assert "are damaged; compiling again" in caplog.text


@pytest.mark.parametrize("change", ["another processor", "kernels gone"])
def test_kept_plans_whose_kernels_cannot_be_used_are_fused_again(
    change: str,
    gated: Gated,
    rows: dict[str, torch.Tensor],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS).close()
    if change == "kernels gone":
        shutil.rmtree(kernel_store.folder_of(cache))
    else:
        monkeypatch.setattr("gascompile.fusion_build._processor_features", lambda: "newer")
    for is_first in (True, False):
        with gascompile.compile(gated, None, rows, cache_dir=cache, **ALWAYS) as compiled:
            assert_close(compiled(**rows), eager(gated, rows))
            assert compiled.fused is not None
            assert compiled.fused.num_ops > 0
            assert (compiled.fused.compile_s > 0) == is_first
