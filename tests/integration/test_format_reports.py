"""What forms cost and lose as reported, the choice of the fastest, and both on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.capture.calls import copies
from gascompile.core import serial
from gascompile.core.errors import InfeasiblePlanError, UnsupportedOpError
from gascompile.core.program import Program
from gascompile.core.workload import Forms
from gascompile.precision.report import FormatReport, output_error
from gascompile.precision.trials import fastest_form
from tests.commands.command_line import failure, json_of, ok
from tests.integration.lossy_net import net

SOURCE = "tests.integration.lossy_net:source"
MACHINE = "cpu-nvme"


def test_the_report_names_every_weight_and_what_it_lost(cache: Path) -> None:
    model, ids = net()
    with gascompile.compile(
        model, "12MiB", example_inputs=(ids,), cache_dir=cache, weights="int8", fuse="off"
    ) as compiled:
        report = compiled.format_report
    found = {weight.name: weight for weight in report.weights}
    assert found.keys() == set(dict(model.named_parameters()))
    rounded = {name for name, weight in found.items() if weight.wire == "int8"}
    # Of the embedding only a few rows move, so it keeps what it has.
    assert rounded == {"up.weight", "down.weight", "head.weight"}
    for name, weight in found.items():
        values = model.get_parameter(name).detach()
        if name not in rounded:
            assert (weight.relative_error, weight.wire) == (0.0, "float32")
            assert weight.size_bytes == values.nbytes
            continue
        assert (weight.stored, weight.compute) == ("float32", "float32")
        groups = values.view(len(values), -1, 16)
        steps = groups.abs().amax(2, keepdim=True) / 127
        lost = float(((groups / steps).round() * steps - groups).norm() / values.norm())
        # Scales are searched, and rounded up to a fifteenth of the largest around.
        assert 0.97 * lost < weight.relative_error < 1.1 * lost
        # A byte a value, half a byte for the scale of a group, two for each sixteen of them; rows end at 16 bytes.
        row_bytes = values.shape[1] + groups.shape[1] // 2 + groups.shape[1] // 16 * 2
        assert weight.size_bytes == len(values) * (-(-row_bytes // 16) * 16)
    assert report.relative_error == max(weight.relative_error for weight in report.weights)
    assert sum(report.size_bytes.values()) == sum(w.size_bytes for w in report.weights)
    assert serial.from_json(FormatReport, serial.to_json(report)) == report


def test_the_measured_error_is_that_of_the_outputs(cache: Path) -> None:
    model, ids = net()
    with torch.no_grad():
        exact = model(ids)
    with gascompile.compile(
        model, "12MiB", example_inputs=(ids,), cache_dir=cache, weights="int4", fuse="off"
    ) as compiled:
        before = compiled(ids)
        error = compiled.measure_error(ids)
        assert error.relative_error == pytest.approx(
            float((before - exact).norm() / exact.norm()), rel=1e-3
        )
        assert list(error.outputs.values()) == [error.relative_error]
        # The plan in use is the lossy one as before.
        assert {w.wire for w in compiled.format_report.weights} >= {"int4", "float32"}
        torch.testing.assert_close(compiled(ids), before, rtol=0, atol=0)


def test_weights_as_stored_lose_nothing(cache: Path) -> None:
    model, ids = net()
    with gascompile.compile(
        model, "12MiB", example_inputs=(ids,), cache_dir=cache, fuse="off"
    ) as compiled:
        assert compiled.measure_error(ids).relative_error == 0
        assert compiled.format_report.relative_error == 0


class Counting(nn.Module):
    """Changes a buffer at every call."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        found: torch.Tensor = self.layer(x) + self.calls
        return found


def test_measuring_leaves_the_buffers_of_the_model_alone(cache: Path) -> None:
    torch.manual_seed(0)
    model, x = Counting(), torch.randn(3, 256)
    with gascompile.compile(
        model, example_inputs=(x,), cache_dir=cache, weights="int8", fuse="off"
    ) as compiled:
        compiled(x)
        expected = model.layer(x) + 2
        error = compiled.measure_error(x)
        assert 0 < error.relative_error < 0.02
        assert float(compiled.states["calls"]) == 1
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0.05)


class Restless(nn.Module):
    """Changes its inputs, of which one is a view of the other, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        found: torch.Tensor = self.layer(x) + row + torch.rand_like(x)
        row.zero_()
        return found


def test_both_runs_of_a_measurement_see_the_same_inputs_and_random_numbers(cache: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 256)
    row, given = x[1:2], x.clone()
    with gascompile.compile(
        Restless(), example_inputs=(x, row), cache_dir=cache, weights="int8", fuse="off"
    ) as compiled:
        before = torch.get_rng_state()
        error = compiled.measure_error(x, row).relative_error
        assert 0 < error < 0.02
        assert compiled.measure_error(x, row).relative_error == error
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(x, given)


def test_copies_of_a_call_share_memory_as_its_tensors_do() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    leaves = [base.t(), base[1], base[1], 3, torch.ones(1).expand(5)]
    leaves.append(leaves[1])
    found = copies(leaves)
    assert [x.stride() for x in found if isinstance(x, torch.Tensor)] == [
        x.stride() for x in leaves if isinstance(x, torch.Tensor)
    ]
    assert found[5] is found[1]
    found[1].zero_()
    assert found[0][:, 1].tolist() == found[2].tolist() == [0.0] * 4
    assert base[1].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_bundle_knows_its_errors_but_not_the_exact_weights(cache: Path, tmp_path: Path) -> None:
    model, ids = net()
    with gascompile.compile(
        model, "12MiB", example_inputs=(ids,), cache_dir=cache, weights="int8", fuse="off"
    ) as compiled:
        report = compiled.format_report
        compiled.save(tmp_path / "bundle")
    with gascompile.load(tmp_path / "bundle") as loaded:
        assert loaded.format_report == report
        with pytest.raises(gascompile.PlanMismatchError, match="where the model is compiled"):
            loaded.measure_error(ids)


def test_an_input_may_be_called_like_a_builtin(cache: Path) -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(256, 256)), torch.randn(2, 256)  # forward(input)
    with gascompile.compile(
        layer, example_inputs=(x,), cache_dir=cache, weights="int8", fuse="off"
    ) as compiled:
        torch.testing.assert_close(compiled(x), layer(x).detach(), rtol=0, atol=0.05)


def test_errors_by_hand() -> None:
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 12.0]), "n": torch.tensor(7)}
    found = {**exact, "a": torch.tensor([3.0, 5.3]), "n": torch.tensor(8)}
    error = output_error(found, exact)
    assert error.outputs == {"['a']": pytest.approx(1.3 / 5), "['b']": 0.0}
    assert error.relative_error == pytest.approx(0.1)
    assert output_error(torch.ones(2), torch.zeros(2)).relative_error == float("inf")
    assert output_error(torch.zeros(2), torch.zeros(2)).relative_error == 0


# ------------------------------------------------------------ the fastest form


@pytest.fixture(scope="module")
def program(kernels: Path) -> Program:
    model, ids = net()
    return gascompile.compile(model, example_inputs=(ids,), cache_dir=kernels, fuse="off").program


def trial(program: Program, times_s: dict[str | None, float | Exception]) -> str:
    """Return the wire form that is chosen where forms take these seconds, or fail so."""
    wires = {None: "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}
    by_wire = {wires[weights]: found for weights, found in times_s.items()}

    def formed(weights: str | None) -> Program:
        if weights not in times_s:
            raise UnsupportedOpError("no such weights")
        forms = Forms(stored="float32", wire=wires[weights], compute="float32")
        return replace(program, forms={"w": forms})

    def predicted_s(candidate: Program) -> float:
        found = by_wire[candidate.forms["w"].wire]
        if isinstance(found, Exception):
            raise found
        return found

    return fastest_form(formed, predicted_s).forms["w"].wire


def infeasible(required_bytes: int) -> InfeasiblePlanError:
    return InfeasiblePlanError(required_bytes=required_bytes, limit_bytes=1, tier="cpu", op="op")


@pytest.mark.parametrize(
    ("times_s", "chosen"),
    [
        ({None: 4.0, "bf16": 2.0, "int8": 1.0, "int4": 1.5}, "int8"),
        ({None: 1.005, "bf16": 1.0, "int8": 1.0, "int4": 1.0}, "float32"),
        ({None: 2.0, "bf16": 1.005, "int8": 1.0, "int4": 1.2}, "bfloat16"),
        ({None: 2.0, "int4": 1.0}, "int4"),
        ({None: infeasible(9), "bf16": infeasible(5), "int8": 3.0, "int4": 2.9}, "int4"),
    ],
)
def test_the_fastest_form_is_chosen_and_the_least_lossy_of_ties(
    times_s: dict[str | None, float | Exception], chosen: str, program: Program
) -> None:
    assert trial(program, times_s) == chosen


def test_where_no_form_fits_the_least_demand_is_told(program: Program) -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        trial(program, {None: infeasible(9), "bf16": infeasible(5), "int8": infeasible(7)})
    assert caught.value.required_bytes == 5


@pytest.mark.parametrize("budget", ["9MiB", "64MiB"])
def test_auto_is_the_best_of_the_plans_with_each_form(budget: str, cache: Path) -> None:
    model, ids = net()
    plans = {
        weights: gascompile.plan(model, budget, MACHINE, (ids,), cache_dir=cache, weights=weights)
        for weights in (None, "bf16", "int8", "int4", "auto")
    }
    times_s = {weights: plan.certificate.predicted_s for weights, plan in plans.items()}
    auto_s = times_s.pop("auto")
    assert auto_s <= 1.01 * min(times_s.values())
    ties = [
        weights for weights, time_s in times_s.items() if time_s <= 1.01 * min(times_s.values())
    ]
    assert auto_s == pytest.approx(times_s[ties[0]])
    if budget == "9MiB":
        assert times_s[None] > 1.5 * auto_s  # or this test would prove nothing


# ------------------------------------------------------------ the command line


def test_forms_on_the_command_line(cache: Path, tmp_path: Path) -> None:
    shared = ("--budget", "12MiB", "--cache-dir", str(cache), "--weights")
    bundle = tmp_path / "bundle"
    data = json_of("run", SOURCE, *shared, "int8", "--measure-error", "--save", str(bundle))
    wires = {weight["name"]: weight["wire"] for weight in data["formats"]["weights"]}
    assert wires["up.weight"] == "int8"
    assert 0 < data["error"]["relative_error"] < 0.03
    assert "outputs off by" in ok("run", SOURCE, *shared, "int8", "--measure-error")
    plain = json_of("run", SOURCE, *shared[:-1])
    assert plain["error"] is None
    assert plain["formats"]["relative_error"] == 0
    assert failure("run", SOURCE, *shared, str(tmp_path))[0] == 2
    code, message = failure("run", str(bundle), "--weights", "int8")
    assert (code, "part of its plan" in message) == (2, True)
    assert failure("run", str(bundle), "--measure-error")[0] == 2
    assert "run" in json_of("run", str(bundle))


def test_plan_takes_a_form(cache: Path, tmp_path: Path) -> None:
    shared = ("-m", MACHINE, "--budget", "9MiB", "--cache-dir", str(cache))
    moved = {
        form: sum(
            link["bytes"] for link in json_of("plan", SOURCE, *shared, "--weights", form)["links"]
        )
        for form in ("bf16", "int8", "auto")
    }
    assert moved["int8"] < 0.6 * moved["bf16"]
    assert moved["auto"] < moved["bf16"]
    assert "int8" in ok("plan", SOURCE, *shared, "--weights", "int8")
    assert "int8" not in ok("plan", SOURCE, *shared)
    assert failure("plan", SOURCE, *shared, "--weights", "int3")[0] == 2
    workload = tmp_path / "net.workload.json"
    ok("annotate", SOURCE, "-m", MACHINE, "-o", str(workload))
    code, message = failure("plan", str(workload), *shared, "--weights", "int8")
    assert (code, "for models" in message) == (2, True)
