"""How much each weight matters: against the same weights disturbed, and what it makes of their forms."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gascompile
from gascompile.api.compile import make_job
from gascompile.core.config import CompileConfig
from gascompile.precision import calibration as form_calibration
from gascompile.precision import choice as forms_choice
from gascompile.precision.sensitivity import Sensitivity, measure_sensitivities
from gascompile.precision.sensitivity_walk import Setting, UnmeasurableError
from tests.integration.lossy_net import Net, net


class Attention(nn.Module):
    """A tied table, attention, results of several parts, and an op that changes its operand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 64)
        self.both = nn.Linear(64, 128)
        self.out = nn.Linear(64, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        query, key = self.both(x).chunk(2, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, x)
        y = self.out(mixed)
        y += x
        y.mul_(2)
        return nn.functional.linear(y, self.table.weight), y


def sensitivities(
    model: nn.Module, ids: torch.Tensor, cache: Path, **options: Any
) -> dict[str, Sensitivity]:
    config = CompileConfig(cache_dir=cache)
    arguments: dict[str, Any] = {"checkpoint": None, "dynamic_shapes": None, "machine": "cpu-nvme"}
    job = make_job(model, None, **arguments, config=config)
    captured = job.capture((ids,), {})
    found = job.resolve(captured.program, captured.canonical, captured.constants, None)
    setting = Setting(
        program=captured.program,
        sources=found.weights.sources,
        held=found.held,
        matrices=[n for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n],
        forms=("int8", "int4"),
        limit_bytes=options.get("limit_bytes", 1 << 30),
    )
    return measure_sensitivities(setting, [options.get("values", ids)])


def disturbed(model: nn.Module, name: str, ids: torch.Tensor) -> float:
    """Return what a disturbance of one weight does, squared and relative, over several of them."""
    weight, found = model.get_parameter(name), []

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([v.double().view(-1) for v in pytree.tree_leaves(model(ids))])

    exact, kept = outputs(), weight.detach().clone()
    step = 1e-3 * kept.square().mean().sqrt()
    for _ in range(10):
        with torch.no_grad():
            weight.copy_(kept + step * torch.randn_like(kept))
        found.append(float((outputs() - exact).square().sum() / exact.square().sum()) / 1e-6)
    with torch.no_grad():
        weight.copy_(kept)
    return sum(found) / len(found)


@pytest.mark.parametrize("kind", ["layers", "attention"])
def test_gains_are_what_disturbances_do(kind: str, cache: Path) -> None:
    torch.manual_seed(0)
    model, ids = net() if kind == "layers" else (Attention().eval(), torch.randint(0, 300, (2, 9)))
    found = sensitivities(model, ids, cache)
    assert len(found) == 3
    for name, sensitivity in found.items():
        measured = disturbed(model, name, ids)
        if name == "table.weight":
            # Looked up and multiplied with: the two add up with a sign that is left out.
            assert 0.5 < sensitivity.gain / measured < 2
        else:
            assert sensitivity.gain == pytest.approx(measured, rel=0.3), name
        assert 0.003 < sensitivity.errors["int8"] < 0.008
        assert 0.05 < sensitivity.errors["int4"] < 0.09


def test_the_same_row_over_and_over_is_no_input_to_measure_on(cache: Path) -> None:
    """With one row alone every key is the same, and what attention compares would not matter."""
    model, ids = Attention().eval(), torch.randint(0, 300, (2, 9))
    found = sensitivities(model, ids, cache, values=torch.zeros_like(ids))
    assert found["both.weight"].gain > 1e-9


def test_what_cannot_be_measured_is_said(cache: Path) -> None:
    model, ids = net()
    with pytest.raises(UnmeasurableError, match=r"more than 20\.00 KiB"):
        sensitivities(model, ids, cache, limit_bytes=20 << 10)
    with pytest.raises(UnmeasurableError, match="no values"):
        sensitivities(model, ids, cache, values=ids.to("meta"))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    with pytest.raises(UnmeasurableError, match="zero"):
        sensitivities(model, ids, cache)


class Uneven(Net):
    """Nearly all that it returns comes through ``up`` and ``down``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(512, 512)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        found: torch.Tensor = self.head(self.mix(x) + 0.01 * self.down(torch.relu(self.up(x))))
        return found


def wires(compiled: gascompile.CompiledModel) -> dict[str, str]:
    return {weight.name: weight.wire for weight in compiled.format_report.weights}


def bits(wire: str) -> int:
    return 16 if wire == "bfloat16" else int(wire.removeprefix("int"))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_weight_that_matters_most_moves_in_more_bits(
    form: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms_choice, "TARGETS", {"int8": 0.0, "int4": 0.0})
    monkeypatch.setattr(forms_choice, "CEILINGS", {"int8": 0.56, "int4": 0.40})
    torch.manual_seed(0)
    model, ids = Uneven().eval(), torch.randint(0, 3000, (2, 5))
    options: dict[str, Any] = {"example_inputs": (ids,), "cache_dir": cache, "fuse": "off"}
    with gascompile.compile(model, "24MiB", **options, weights=form) as compiled:
        found, report = wires(compiled), compiled.format_report
        error = compiled.measure_error(ids).relative_error
    others = [found[name] for name in ("up.weight", "down.weight", "head.weight")]
    assert bits(found["mix.weight"]) > max(map(bits, others))
    assert form in others
    packed = {"up.weight", "down.weight", "head.weight", "mix.weight"}
    numel = sum(model.get_parameter(name).numel() for name in packed)
    size_bytes = sum(w.size_bytes for w in report.weights if w.name in packed)
    assert size_bytes <= {"int8": 0.56, "int4": 0.40}[form] * 2 * numel
    assert 0 < error < {"int8": 0.006, "int4": 0.08}[form]


@pytest.mark.parametrize(("form", "most"), [("int8", 0.01), ("int4", 0.06)])
def test_an_error_that_is_small_enough_takes_no_more_bytes(
    form: str, most: float, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, ids = Uneven().eval(), torch.randint(0, 3000, (2, 5))
    options: dict[str, Any] = {"example_inputs": (ids,), "cache_dir": cache, "fuse": "off"}
    with gascompile.compile(model, "24MiB", **options, weights=form) as compiled:
        size_bytes = sum(weight.size_bytes for weight in compiled.format_report.weights)
        assert 0 < compiled.measure_error(ids).relative_error < most
    monkeypatch.setattr(forms_choice, "TARGETS", {form: 0.0})
    options["cache_dir"] = cache / "other"
    with gascompile.compile(model, "24MiB", **options, weights=form) as compiled:
        assert sum(weight.size_bytes for weight in compiled.format_report.weights) > size_bytes


def test_what_was_measured_is_remembered_for_other_inputs(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, ids = Uneven().eval(), torch.randint(0, 3000, (2, 5))
    options: dict[str, Any] = {"cache_dir": cache, "fuse": "off", "weights": "int8"}
    with gascompile.compile(model, "24MiB", example_inputs=(ids,), **options) as compiled:
        first = wires(compiled)
    (file,) = (cache / "sensitivities").glob("*.json")
    assert json.loads(file.read_text())["weights"].keys() >= {"mix.weight"}

    def measured(*_: object) -> None:
        raise AssertionError("it has been measured")

    monkeypatch.setattr(form_calibration, "measure_sensitivities", measured)
    with gascompile.compile(model, "20MiB", example_inputs=(ids[:1],), **options) as compiled:
        assert wires(compiled) == first
    assert len(list((cache / "store").glob("*.safetensors"))) == 2  # as stored, and converted
    file.write_text("{")
    with pytest.raises(AssertionError, match="has been measured"):
        gascompile.compile(model, "22MiB", example_inputs=(ids,), **options)


def test_where_measuring_fails_the_first_layers_count_most(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise UnmeasurableError("op 'x' has no derivative")

    monkeypatch.setattr(form_calibration, "measure_sensitivities", failing)
    torch.manual_seed(0)
    model, ids = Uneven().eval(), torch.randint(0, 3000, (2, 5))
    with (
        caplog.at_level(logging.WARNING, logger="gascompile"),
        gascompile.compile(
            model, "24MiB", example_inputs=(ids,), cache_dir=cache, weights="int8", fuse="off"
        ) as compiled,
    ):
        found = wires(compiled)
        assert bits(found["mix.weight"]) > bits(found["head.weight"])
    assert "no derivative" in caplog.text
    assert not list(cache.glob("sensitivities/*"))
