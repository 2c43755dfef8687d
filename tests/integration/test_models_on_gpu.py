"""Models on a GPU that is there: eager's results within budgets, from its memory, the host's and a drive."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

import gascompile
from tests import zoo
from tests.integration.site_models import ROWS, WIDTH, Towers
from tests.integration.test_device_states import Counting, assert_states, images

pytestmark = pytest.mark.gpu

_REDUCED = {"reduced"}
"""Models that compute in reduced types, whose ops round more."""


def assert_near(found: Any, wanted: list[Any], share: float) -> None:
    """Compare with eager's results, whose products and convolutions may add up in another order."""
    leaves = pytree.tree_leaves(found)
    assert len(leaves) == len(wanted)
    for value, other in zip(leaves, wanted, strict=True):
        if not isinstance(other, torch.Tensor):
            assert value == other
        elif other.is_floating_point():
            scale = float(other.detach().abs().max())
            torch.testing.assert_close(value.cpu(), other, rtol=0, atol=share * scale)
        else:
            assert torch.equal(value.cpu(), other)


def off_by(found: Any, wanted: list[Any]) -> list[float]:
    """Return the largest difference of each result that is a tensor."""
    pairs = zip(pytree.tree_leaves(found), wanted, strict=True)
    return [
        float((value.cpu().double() - other.double()).abs().max())
        for value, other in pairs
        if isinstance(other, torch.Tensor)
    ]


def eager_there(model: nn.Module, inputs: dict[str, Any]) -> list[Any]:
    """Return what eager computes on the GPU, or on the processor where the model makes tensors there."""
    try:
        there = pytree.tree_map_only(torch.Tensor, lambda x: x.cuda(), inputs)
        found = zoo.eager(copy.deepcopy(model).cuda(), there)
    except RuntimeError:
        found = zoo.eager(model, inputs)
    return [x.cpu() if isinstance(x, torch.Tensor) else x for x in found]


def least_bytes(model: nn.Module, **options: Any) -> int:
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, **options)
    return error.value.required_bytes


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", sorted(zoo.CASES))
def test_equal_to_eager_within_the_budget(name: str, cache: Path) -> None:
    model, inputs = zoo.make(name)
    wanted = eager_there(model, inputs)
    options: dict[str, Any] = {"example_inputs": inputs, "cache_dir": cache}
    least = least_bytes(model, **options)
    for budget in (least, least + (1 << 20), None):
        with gascompile.compile(model, budget, **options) as compiled:
            assert compiled.plan.machine.compute_backend == "cuda"
            for call in range(4):
                found = compiled(**inputs)
                try:
                    assert_near(found, wanted, 2e-2 if name in _REDUCED else 5e-4)
                except AssertionError as error:
                    error.add_note(f"budget {budget}, call {call}, {compiled.graphs}")
                    error.add_note(f"each result is off by {off_by(found, wanted)}")
                    raise
                report = compiled.last_run
                assert report is not None
                assert report.peak_bytes["gpu"] <= compiled.plan.budget_bytes["gpu"]
                assert report.peak_bytes["cpu"] <= compiled.plan.budget_bytes["cpu"]
            assert report is not None
            moved = {link: count for link, count in report.link_bytes.items() if count}
            assert moved == {k: count for k, count in compiled.plan.link_bytes.items() if count}


@pytest.mark.parametrize("host", [None, 1 << 20], ids=["from memory", "from a drive"])
def test_weights_of_a_checkpoint(host: int | None, cache: Path, tmp_path: Path) -> None:
    model, inputs = zoo.make("llama")
    wanted = zoo.eager(model, inputs)
    path = tmp_path / "model.safetensors"
    save_file({name: value.clone() for name, value in model.state_dict().items()}, path)
    skeleton: Any = copy.deepcopy(model).to("meta")
    whole: Any = model
    skeleton.model.rotary_emb = whole.model.rotary_emb
    options: dict[str, Any] = {
        "example_inputs": inputs, "cache_dir": cache, "checkpoint": path,
    }  # fmt: skip
    least = least_bytes(skeleton, **options)
    gpu = least + (1 << 16)
    passing = 0
    if host is not None:
        with pytest.raises(gascompile.InfeasiblePlanError) as error:
            gascompile.compile(skeleton, gascompile.Budget(gpu=gpu, cpu=1), **options)
        passing = error.value.required_bytes
    budget = gascompile.Budget(gpu=gpu, cpu=None if host is None else passing)
    with gascompile.compile(skeleton, budget, **options) as compiled:
        for _ in range(3):
            assert_near(compiled(**inputs), wanted, 1e-4)
            report = compiled.last_run
            assert report is not None
            assert report.peak_bytes["gpu"] <= gpu
        assert report is not None
        assert any(report.link_bytes.values())
        compiled.save(tmp_path / "bundle")
    with gascompile.load(tmp_path / "bundle") as loaded:
        assert_near(loaded(**inputs), wanted, 1e-4)


def test_states_follow_eager(cache: Path) -> None:
    torch.manual_seed(2)
    model = Counting().train()
    eager = copy.deepcopy(model)
    options: dict[str, Any] = {"example_inputs": (images(0),), "cache_dir": cache}
    with gascompile.compile(model, least_bytes(model, **options), **options) as compiled:
        for seed in range(5):
            with torch.no_grad():
                wanted = eager(images(seed))
            torch.testing.assert_close(compiled(images(seed)).cpu(), wanted, rtol=0, atol=1e-4)
        found = {name: value.cpu() for name, value in compiled.states.items()}
        assert_states(found, eager)


def test_inputs_on_the_gpu_and_in_memory_give_one_result(cache: Path) -> None:
    model, inputs = zoo.make("gpt2")
    there = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with gascompile.compile(model, None, cache_dir=cache) as compiled:
        here, other = (pytree.tree_leaves(compiled(**x)) for x in (inputs, there))
        for a, b in zip(here, other, strict=True):
            if isinstance(a, torch.Tensor):
                assert torch.equal(a.cpu(), b.cpu())


def test_results_of_earlier_calls_stay_as_they_are(cache: Path) -> None:
    model, inputs = zoo.make("llama")
    with gascompile.compile(model, None, example_inputs=inputs, cache_dir=cache) as compiled:
        kept = []
        for run in range(5):
            ids = inputs["input_ids"].roll(run, -1)
            found = compiled(**{**inputs, "input_ids": ids})
            kept.append((found, [x.cpu().clone() for x in pytree.tree_leaves(found)]))
        for found, values in kept:
            for value, wanted in zip(pytree.tree_leaves(found), values, strict=True):
                assert torch.equal(value.cpu(), wanted)


def test_both_processors_compute_at_once(cache: Path) -> None:
    torch.manual_seed(1)
    model = Towers().eval()
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        wanted = pytree.tree_leaves(model(x))
    options: dict[str, Any] = {"example_inputs": (x,), "cache_dir": cache, "sites": "all"}
    with gascompile.compile(model, least_bytes(model, **options), **options) as compiled:
        for _ in range(4):
            assert_near(compiled(x), wanted, 1e-4)
            report = compiled.last_run
            assert report is not None
            assert report.peak_bytes["gpu"] <= compiled.plan.budget_bytes["gpu"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_weights_that_are_packed(precision: str, cache: Path) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(512, 768), nn.GELU(), nn.Linear(768, 512)).eval()
    x = torch.randn(3, 512)
    options: dict[str, Any] = {"example_inputs": (x,), "cache_dir": cache, "weights": precision}
    with gascompile.compile(model, "1GiB", machine="cpu-nvme", **options) as here:
        wanted = [here(x).clone()]
    for budget in (least_bytes(model, **options), None):
        with gascompile.compile(model, budget, **options) as there:
            for _ in range(3):
                assert_near(there(x), wanted, 1e-3)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "T5"])
@pytest.mark.parametrize("is_small", [True, False], ids=["small", "roomy"])
def test_generate_gives_the_tokens_of_transformers(
    family: str, is_small: bool, cache: Path
) -> None:
    from tests.integrations import generation_table as table

    model = table.made(family)
    inputs = table.prompt(family)
    wanted = table.generated(model, inputs, "greedy")
    budget = "64MiB" if is_small else None
    with gascompile.compile(model, budget, cache_dir=cache) as compiled:
        found = table.generated(compiled, inputs, "greedy")
        on_host = pytree.tree_map_only(torch.Tensor, lambda x: x.cpu(), found)
        assert table.same(on_host, wanted)
