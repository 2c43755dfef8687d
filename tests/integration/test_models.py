"""Any model at any feasible budget: results equal eager's, the measured peak keeps the budget."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gascompile
from gascompile.capture.calls import bind_call
from gascompile.capture.export import capture
from tests import zoo
from tests.allocator import peak_growth_bytes
from tests.zoo import assert_same, eager

MIB = 1 << 20


def smallest_budget(model: nn.Module, inputs: Mapping[str, Any], cache: Path) -> int:
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, example_inputs=inputs, cache_dir=cache)
    return error.value.required_bytes


def flat_run_bytes(compiled: gascompile.CompiledModel, inputs: Mapping[str, Any]) -> int:
    """Return what a run allocated, without the copies that transformers makes to build its cache objects."""
    executor = compiled._gascompile.executor
    assert executor is not None
    leaves = pytree.tree_leaves(bind_call(compiled._gascompile.names, (), inputs))
    return peak_growth_bytes(lambda: executor.run(*leaves))


@pytest.fixture
def _traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace a model for one budget and take that for the others, too: other tests look at tracing."""
    known: dict[int, Any] = {}

    def once(model: nn.Module, *rest: Any, **options: Any) -> Any:
        if id(model) not in known:
            known[id(model)] = capture(model, *rest, **options)
        return known[id(model)]

    monkeypatch.setattr("gascompile.capture.export.capture", once)


BETWEEN = ("llama", "convnet", "tied")
"""Models that are run in a budget between the extremes, too."""


@pytest.mark.usefixtures("_traced_once")
@pytest.mark.parametrize("name", zoo.CASES)
def test_equal_to_eager_at_every_budget(name: str, cache: Path) -> None:
    model, inputs = zoo.make(name)
    expected = eager(model, inputs)
    full = gascompile.plan(model, example_inputs=inputs, cache_dir=cache).peak_bytes["cpu"]
    smallest = smallest_budget(model, inputs, cache)
    times = []
    half = [max(full // 2, smallest)] if name in BETWEEN else []
    for budget in (full, *half, smallest):
        with gascompile.compile(model, budget, example_inputs=inputs, cache_dir=cache) as compiled:
            for _ in range(3):
                assert_same(compiled(**inputs), expected)
                report = compiled.last_run
                assert report is not None
                assert report.peak_bytes["cpu"] <= budget
            assert report is not None
            assert report.link_bytes["nvme->cpu"] == compiled.plan.link_bytes["nvme->cpu"]
            plan = compiled.plan
            outside = plan.peak_bytes["cpu"] - plan.arena_bytes["cpu"]
            outside -= sum(tensor.nbytes for tensor in compiled.states.values())
            assert flat_run_bytes(compiled, inputs) <= outside
            times.append(plan.certificate.predicted_s)
    assert times == sorted(times)
    assert full > smallest


def test_one_byte_below_the_smallest_budget_is_refused(cache: Path) -> None:
    model, inputs = zoo.make("llama")
    smallest = smallest_budget(model, inputs, cache)
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, smallest - 1, example_inputs=inputs, cache_dir=cache)
    assert error.value.required_bytes == smallest
    assert error.value.op in str(error.value)
    assert str(smallest) in str(error.value)


def test_batchnorm_in_training_mode_updates_the_model(cache: Path) -> None:
    torch.manual_seed(1)
    model = zoo.ConvNet().train()
    twin = zoo.ConvNet().train()
    twin.load_state_dict(model.state_dict())
    image = torch.randn(4, 3, 16, 16)
    compiled = gascompile.compile(model, example_inputs={"image": image}, cache_dir=cache)
    for _ in range(3):
        with torch.no_grad():
            assert_same(compiled(image), [twin(image)])
    for found, wanted in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_dynamic_batch_is_planned_for_its_maximum(cache: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval()
    batch = torch.export.Dim("batch", min=1, max=128)
    compiled = gascompile.compile(
        model,
        example_inputs={"input": torch.randn(16, 64)},
        dynamic_shapes={"input": {0: batch}},
        cache_dir=cache,
    )
    for rows in (1, 7, 128):
        x = torch.randn(rows, 64)
        assert_same(compiled(x), eager(model, {"input": x}))
        assert compiled.last_run is not None
        assert compiled.last_run.peak_bytes["cpu"] <= compiled.plan.peak_bytes["cpu"]
    with pytest.raises(gascompile.PlanMismatchError, match=r"\[129, 64\].*in 1\.\.128"):
        compiled(torch.randn(129, 64))


def test_without_example_inputs_each_signature_is_planned_once(cache: Path) -> None:
    model = nn.Linear(8, 8).eval()  # its argument is called like the builtin 'input'
    compiled = gascompile.compile(model, dynamic_shapes=False, cache_dir=cache)
    with pytest.raises(gascompile.PlanMismatchError, match="nothing is planned yet"):
        _ = compiled.plan
    for rows in (2, 3, 2):
        x = torch.randn(rows, 8)
        assert_same(compiled(x), eager(model, {"input": x}))
    assert repr(compiled) == "CompiledModel(Linear, 2 plan(s))"


def test_argument_called_like_a_builtin_survives_saving(cache: Path, tmp_path: Path) -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    compiled = gascompile.compile(model, example_inputs={"input": x}, cache_dir=cache)
    compiled.save(tmp_path / "bundle")
    assert_same(gascompile.load(tmp_path / "bundle")(x), eager(model, {"input": x}))


def test_bundle_of_a_model_in_memory_holds_its_weights(cache: Path, tmp_path: Path) -> None:
    model, x = nn.Linear(300, 300).eval(), torch.randn(2, 300)
    gascompile.compile(model, example_inputs=(x,), cache_dir=cache).save(tmp_path / "bundle")
    shutil.rmtree(cache)
    (tmp_path / "bundle").rename(tmp_path / "moved")
    assert_same(gascompile.load(tmp_path / "moved")(x), eager(model, {"input": x}))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral", "clip", "whisper"])
def test_from_a_saved_checkpoint_on_the_meta_device(name: str, cache: Path, tmp_path: Path) -> None:
    model, inputs = zoo.make(name)
    expected = eager(model, inputs)
    model.save_pretrained(tmp_path, max_shard_size="200KB")  # type: ignore[operator]  # a HF model
    with torch.device("meta"):
        skeleton = type(model)(model.config).eval()
    compiled = gascompile.compile(
        skeleton, "700KiB", example_inputs=inputs, checkpoint=tmp_path, cache_dir=cache
    )
    for _ in range(2):
        assert_same(compiled(**inputs), expected)
    assert not (cache / "store").exists() or not list((cache / "store").glob("*.safetensors"))
