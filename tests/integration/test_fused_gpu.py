"""Fused ops of plans for a GPU, without one: eager's results, the promised memory, code only from here."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import gascompile
from gascompile.codegen import gpu_kernels
from gascompile.codegen.build import KernelBuildError
from gascompile.codegen.cubin import Image
from gascompile.codegen.target import GpuTarget
from gascompile.codegen.triton import TritonSource
from tests import zoo
from tests.integration.fused_gpu import FusedGpu
from tests.integration.fused_models import ALWAYS, Gated, assert_close
from tests.interpreted_gpu import needs_interpreter
from tests.zoo import eager

pytestmark = needs_interpreter


@pytest.fixture
def gpu(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FusedGpu:
    return FusedGpu(cache, monkeypatch)


@pytest.mark.parametrize("name", ["mamba2"])
def test_results_and_memory_of_fused_models(name: str, gpu: FusedGpu, cache: Path) -> None:
    model, inputs = zoo.make(name)
    expected = eager(model, inputs)
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, example_inputs=inputs, machine=gpu.machine, cache_dir=cache)
    smallest = error.value.required_bytes
    calm = [(smallest, "off")] if name == "llama" else []
    for budget, graphs in ((None, "auto"), *calm, (smallest, "auto")):
        options = {"machine": gpu.machine, "cache_dir": cache, "graphs": graphs, **ALWAYS}
        with gascompile.compile(model, budget, example_inputs=inputs, **options) as compiled:
            assert compiled.fused is not None
            assert compiled.fused.num_ops > compiled.fused.num_segments > 0, compiled.fused.reason
            for _ in range(2):
                before = gpu.library.num_computed
                assert_close(compiled(**inputs), expected)
                # With graphs, the second run replays them.
                assert gpu.library.num_computed - before >= compiled.fused.num_segments
                report, plan = compiled.last_run, compiled.plan
                assert report is not None
                assert report.peak_bytes["gpu"] <= plan.budget_bytes["gpu"]
            if budget is None:
                assert compiled.graphs is not None
                assert compiled.graphs.num_ops > compiled.fused.num_ops, compiled.graphs.reason
    assert set(gpu.compiled.values()) == {1}, "each kernel is compiled once"


def test_it_pays_or_it_is_left(
    gated: Gated, rows: dict[str, torch.Tensor], gpu: FusedGpu, cache: Path
) -> None:
    with gascompile.compile(
        gated, None, rows, machine=gpu.machine, cache_dir=cache, fuse_runs=1
    ) as compiled:
        assert compiled.fused is not None
        assert "raise fuse_runs" in compiled.fused.reason
        assert torch.equal(compiled(**rows), eager(gated, rows)[0])
    assert not gpu.library.launches


def test_a_kernel_that_does_not_compile_leaves_the_others(
    gated: Gated,
    rows: dict[str, torch.Tensor],
    gpu: FusedGpu,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_image = gpu._compile
    refused: list[str] = []

    def refuse_first(source: TritonSource, target: GpuTarget) -> Image:
        if not refused:
            refused.append(source.symbol)
            raise KernelBuildError("too much shared memory")
        return compile_image(source, target)

    monkeypatch.setattr(gpu_kernels, "compile_image", refuse_first)
    with gascompile.compile(
        gated, None, rows, machine=gpu.machine, cache_dir=cache, **ALWAYS
    ) as compiled:
        assert_close(compiled(**rows), eager(gated, rows))
        assert compiled.fused is not None
        assert compiled.fused.num_segments > 0
    assert refused[0] not in {x.symbol for x in gpu.library.launches}


def test_without_triton_ops_run_one_by_one_until_it_is_there(
    gated: Gated,
    rows: dict[str, torch.Tensor],
    gpu: FusedGpu,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for missing in ("Triton is not installed", ""):
        monkeypatch.setattr(gpu_kernels, "missing_triton", lambda reason=missing: reason)
        with gascompile.compile(
            gated, None, rows, machine=gpu.machine, cache_dir=cache, **ALWAYS
        ) as compiled:
            assert compiled.fused is not None
            assert compiled.fused.reason == missing
            assert bool(gpu.library.launches) is False
            assert_close(compiled(**rows), eager(gated, rows))
            assert (compiled.fused.num_ops > 0) == (not missing)


# ------------------------------------------------------------ bundles


@pytest.fixture
def bundle(gated: Gated, rows: dict[str, torch.Tensor], gpu: FusedGpu, cache: Path) -> Path:
    """Return a bundle of kernels whose compiler knows where: in ``cache``."""
    folder = cache / "bundle"
    with gascompile.compile(
        gated, None, rows, machine=gpu.machine, cache_dir=cache, **ALWAYS
    ) as compiled:
        compiled.save(folder)
    gpu.compiled.clear()
    gpu.restart()
    return folder


def test_a_bundle_runs_fused_and_compiles_nothing(
    bundle: Path,
    gated: Gated,
    rows: dict[str, torch.Tensor],
    gpu: FusedGpu,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GASCOMPILE_CACHE_DIR", str(cache))
    with gascompile.load(bundle, any_machine=True) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops > 0
        assert loaded.fused.compile_s == 0
        assert_close(loaded(**rows), eager(gated, rows))
    assert gpu.library.launches
    assert not gpu.compiled


def test_code_of_unknown_origin_is_not_run(
    bundle: Path,
    gated: Gated,
    rows: dict[str, torch.Tensor],
    gpu: FusedGpu,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="gascompile"),
        gascompile.load(bundle, any_machine=True) as loaded,
    ):
        assert loaded.fused is not None
        assert "allow_code=True" in loaded.fused.reason
        assert torch.equal(loaded(**rows), eager(gated, rows)[0])
    assert not gpu.library.images
    with gascompile.load(bundle, any_machine=True, allow_code=True) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops > 0
        assert_close(loaded(**rows), eager(gated, rows))


def test_kernels_for_another_capability_are_not_run(
    bundle: Path, gated: Gated, rows: dict[str, torch.Tensor], gpu: FusedGpu
) -> None:
    gpu.target = GpuTarget(major=8, minor=0, multi_processor_count=108)
    with gascompile.load(bundle, any_machine=True, allow_code=True) as loaded:
        assert loaded.fused is not None
        assert "were made for capability 9.0, this is 8.0" in loaded.fused.reason
        assert torch.equal(loaded(**rows), eager(gated, rows)[0])
    gpu.target = None
    with gascompile.load(bundle, any_machine=True, allow_code=True) as loaded:
        assert loaded.fused is not None
        assert "no GPU here" in loaded.fused.reason
    assert not gpu.library.images


def test_another_compiler_is_no_reason_to_leave_kernels_out(
    bundle: Path, gpu: FusedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gascompile.codegen.cubin.triton_version", lambda: "0.0")
    monkeypatch.setattr(gpu_kernels, "missing_triton", lambda: "there is none")
    with gascompile.load(bundle, any_machine=True, allow_code=True) as loaded:
        assert loaded.fused is not None
        assert loaded.fused.num_ops > 0


@pytest.mark.parametrize("suffix", ["so", "json"])
def test_damaged_kernels_are_refused(bundle: Path, suffix: str, gpu: FusedGpu) -> None:
    (file,) = bundle.glob(f"kernels-*.{suffix}")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(gascompile.FormatError, match="checksum differs"):
        gascompile.load(bundle, any_machine=True, allow_code=True)
    assert not gpu.library.images


SECOND_PROCESS = """
import sys
from types import SimpleNamespace
import torch, gascompile, gascompile.api.load
from gascompile.codegen import gpu_kernels
from gascompile.codegen.target import GpuTarget
from gascompile.runtime.devices.driver import CudaDriver
from gascompile.runtime.devices.cuda import CudaDevice
from tests.runtime.devices.fake_cuda import fake_cuda

launches = []

def give(into, *_):
    into._obj.value = 1
    return 0

def launch(function, *given):
    launches.append(given)
    return 0

library = SimpleNamespace(
    cuInit=lambda flags: 0, cuDeviceGet=give, cuDevicePrimaryCtxRetain=give, cuModuleLoadData=give,
    cuModuleGetFunction=give, cuCtxSetCurrent=lambda c: 0, cuFuncSetAttribute=lambda *a: 0,
    cuLaunchKernel=launch,
)
driver = CudaDriver(library, lambda device: 7)
gpu_kernels.open_driver = lambda: driver
gpu_kernels.target_here = lambda: GpuTarget(major=9, minor=0, multi_processor_count=132)
gascompile.api.load.admit_saved = lambda plan: plan
gascompile.api.unit.admit_plan = lambda plan: None
gascompile.api.unit.device_of = lambda machine: torch.device("cpu")
gascompile.runtime.run.session.device_for = lambda machine: CudaDevice(api=fake_cuda()[0])
"""


def test_a_second_process_needs_neither_triton_nor_inductor(bundle: Path, root: Path) -> None:
    # The cache of who saved it: elsewhere it would first be run on fake tensors.
    options = {"any_machine": True, "allow_code": True, "cache_dir": str(bundle.parent)}
    code = SECOND_PROCESS + textwrap.dedent(
        f"""
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                assert not name.startswith(("triton", "torch._inductor")), f"imports {{name}}"

        sys.meta_path.insert(0, Refuse())
        with gascompile.load({str(bundle)!r}, **{options!r}) as loaded:
            loaded(x=torch.ones(3, 128))
            assert loaded.fused.num_ops > 0 and loaded.fused.compile_s == 0, loaded.fused
            assert len(launches) >= loaded.fused.num_segments
        loaded = [name for name in sys.modules if name.startswith(("triton", "torch._inductor"))]
        assert not loaded, loaded
        """
    )
    code = code.replace(
        "import torch, gascompile\n", "import torch, gascompile, gascompile.api.compiled\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_a_record_that_names_no_image_is_refused(bundle: Path, gpu: FusedGpu) -> None:
    (file,) = bundle.glob("kernels-*.json")
    record = json.loads(file.read_text())
    assert record["built_for"]["backend"] == "cuda"
    assert set(record["functions"]) == {
        launch["symbol"] for kernel in record["kernels"].values() for launch in kernel["launches"]
    }
    size_bytes = file.with_suffix(".so").stat().st_size
    assert max(of["stop"] for of in record["functions"].values()) == size_bytes
