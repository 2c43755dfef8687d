"""Weights that move in other forms than they are computed in: results, budgets, files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils import _pytree as pytree

import gascompile
from gascompile.capture.calls import bind_call
from gascompile.formats.ops import LINEAR, FormSpec, decoded
from gascompile.formats.quantize import pack
from gascompile.formats.workspace import linear_workspace_bytes
from gascompile.integrations.huggingface import register_pytrees
from gascompile.weights.convert import conversion_errors
from gascompile.weights.store_check import NOTES
from tests import zoo
from tests.allocator import peak_growth_bytes
from tests.integration.lossy_net import Net, net

MIB = 1 << 20


def outputs(model: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    register_pytrees()
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(*args, **kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def rounded_checkpoint(model: nn.Module, file: Path) -> None:
    """Round the model to bf16 and write it as such; the model keeps the rounded values in its own dtype."""
    state = {name: t for name, t in model.state_dict().items() if t.dtype == torch.float32}
    with torch.no_grad():
        for tensor in state.values():
            tensor.copy_(tensor.bfloat16())
    seen: set[int] = set()
    kept = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            is_rounded = name in state
            kept[name] = (tensor.bfloat16() if is_rounded else tensor).contiguous().clone()
    save_file(kept, file)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "convnet", "tied", "modules"])
def test_a_bf16_checkpoint_is_computed_in_fp32_without_loss(
    name: str, cache: Path, tmp_path: Path
) -> None:
    model, inputs = zoo.make(name)
    rounded_checkpoint(model, tmp_path / "model.safetensors")
    expected = outputs(model, **inputs)
    compiled = gascompile.compile(
        model, example_inputs=inputs, checkpoint=tmp_path / "model.safetensors", cache_dir=cache
    )
    with compiled:
        found = [v for v in pytree.tree_leaves(compiled(**inputs)) if isinstance(v, torch.Tensor)]
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5)
        report = compiled.last_run
        assert report is not None
        assert report.peak_bytes["cpu"] <= compiled.plan.budget_bytes["cpu"]
        forms = [t.forms for t in compiled.plan.tensors.values() if t.forms]
        assert forms
        assert {(f.wire, f.compute) for f in forms} == {("bfloat16", "float32")}


def with_decoded_weights(model: Net, compiled: gascompile.CompiledModel) -> Net:
    """Return the model with the values that the wire forms in the store decode to."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    state = {}
    for name, forms in compiled.program.forms.items():
        (file,) = {extent.path for extent in compiled.weights.sources[name].extents}
        wire = load_file(file)[name]
        state[name] = decoded(
            wire,
            forms.wire,
            shapes[name][-1],
            FormSpec(stored="", wire=forms.wire).group,
            torch.float32,
        )
    assert state
    # A copy: what is written to the model itself is planned for anew.
    found = copy.deepcopy(model)
    found.load_state_dict(state, strict=False)
    return found


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("budget", [10 * MIB, 40 * MIB])
def test_a_lossy_form_computes_what_its_weights_decode_to(
    form: str, budget: int, cache: Path
) -> None:
    model, ids = net()
    exact = outputs(model, ids)[0]
    with gascompile.compile(
        model, budget, example_inputs=(ids,), cache_dir=cache, weights=form, fuse="off"
    ) as compiled:
        expected = outputs(with_decoded_weights(model, compiled), ids)[0]
        for _ in range(2):
            torch.testing.assert_close(compiled(ids), expected, rtol=1e-5, atol=1e-4)
        report = compiled.last_run
        assert report is not None
        assert report.peak_bytes["cpu"] <= budget
        executor = compiled._gascompile.executor
        assert executor is not None
        plan = compiled.plan
        leaves = pytree.tree_leaves(bind_call(compiled._gascompile.names, (ids,), {}))
        allocated = peak_growth_bytes(lambda: executor.run(*leaves))
        assert allocated <= plan.peak_bytes["cpu"] - plan.arena_bytes["cpu"]
        wires = {t.forms.wire for t in plan.tensors.values() if t.forms}
        assert {"bf16": "bfloat16"}.get(form, form) in wires
    limit = {"bf16": 0.01, "int8": 0.03, "int4": 0.3}[form]
    assert 0 < float((expected - exact).norm() / exact.norm()) < limit


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 31, 32, 128])
def test_a_wire_layer_multiplies_within_the_workspace_it_plans(form: str, rows: int) -> None:
    torch.manual_seed(0)
    packed, x = pack(torch.randn(3000, 1024), form, 32), torch.randn(rows, 1024)
    found = []
    allocated = peak_growth_bytes(lambda: found.append(LINEAR(x, packed, None, form, 32)))
    expected = x.double() @ decoded(packed, form, 1024, 32, torch.float32).double().t()
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=1e-3)
    assert allocated - found[0].nbytes <= linear_workspace_bytes(x, packed, form, 32)


def test_a_form_is_written_once_and_says_what_it_lost(cache: Path) -> None:
    model, ids = net()
    with gascompile.compile(model, example_inputs=(ids,), cache_dir=cache, weights="int8"):
        pass
    files = {f: f.stat().st_mtime_ns for f in (cache / "store").glob("*.safetensors")}
    with gascompile.compile(
        model, 20 * MIB, example_inputs=(ids,), cache_dir=cache, weights="int8"
    ):
        pass
    assert {f: f.stat().st_mtime_ns for f in (cache / "store").glob("*.safetensors")} == files
    (packed,) = (f for f in files if conversion_errors(f))
    errors = conversion_errors(packed)
    original = dict(model.named_parameters())
    assert errors.keys() == {"up.weight", "down.weight", "head.weight"}
    for name, wire in load_file(packed).items():
        exact = original[name].detach()
        found = decoded(wire, "int8", exact.shape[1], 16, torch.float32)
        assert errors[name] == pytest.approx(float((found - exact).norm() / exact.norm()), rel=1e-3)


def test_a_checkpoint_that_would_be_rounded_is_refused_unless_asked_for(
    cache: Path, tmp_path: Path
) -> None:
    model, ids = net()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    reduced = net()[0].to(torch.bfloat16)
    arguments: dict[str, Any] = {
        "example_inputs": (ids,),
        "checkpoint": tmp_path / "model.safetensors",
        "cache_dir": cache,
    }
    with pytest.raises(gascompile.CheckpointError, match='weights="bf16"'):
        gascompile.compile(reduced, **arguments)
    expected = outputs(reduced, ids)[0]
    with gascompile.compile(reduced, **arguments, weights="bf16") as compiled:
        torch.testing.assert_close(compiled(ids), expected, rtol=0, atol=0)


def test_a_form_that_no_weight_can_have_is_refused(cache: Path) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(gascompile.UnsupportedOpError, match="int4"):
        gascompile.compile(
            model, example_inputs=(torch.ones(1, 8),), cache_dir=cache, weights="int4"
        )


def test_infinite_weights_are_refused_and_leave_nothing_behind(cache: Path) -> None:
    model, ids = net()
    with torch.no_grad():
        model.up.weight[3, 4] = torch.inf
    with pytest.raises(gascompile.CheckpointError, match=r"up\.weight"):
        gascompile.compile(model, example_inputs=(ids,), cache_dir=cache, weights="int8")
    assert not [f for f in (cache / "store").glob(".*") if f.name not in {".lock", NOTES}]


def test_int8_keeps_values_whose_squares_float32_cannot_hold() -> None:
    weight = torch.randn(3, 100) * 1e25
    found = decoded(pack(weight, "int8", 16), "int8", 100, 16, torch.float32)
    wrong = (found.double() - weight.double()).norm() / weight.double().norm()
    assert 0 < wrong < 0.01
