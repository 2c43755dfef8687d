"""A schedule that is written out as a function does what the loop over its steps does."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile.codegen.allocator_library import allocation_counter
from gascompile.codegen.build import has_compiler
from gascompile.passes.graph.insert import insert
from gascompile.runtime.memory.counting import Counter
from gascompile.runtime.run.calls import _DIRECT, direct
from gascompile.runtime.run.executor import Executor
from tests.runtime.test_executor import build, call
from tests.runtime.toys import aten, make_plan, mlp

RUNS = 5
"""After some of which the schedule is written out."""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Counter:
    """Return the counter without which steps have meters, and are not written out."""
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    found = allocation_counter(tmp_path_factory.mktemp("counting"))
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have schedules written out however long their steps take under load."""
    monkeypatch.setattr("gascompile.runtime.run.straight._SHORT_STEP_S", float("inf"))


@pytest.mark.parametrize("seed", range(4))
def test_results_and_peaks_are_the_same(tmp_path: Path, counter: Counter, seed: int) -> None:
    toy = mlp(tmp_path)
    residents = frozenset([*toy.weights][::2] if seed % 2 else toy.weights)
    plan = make_plan(toy.workload, residents=residents, seed=seed)
    peaks = []
    with toy.session(plan) as session:
        executor = Executor(session, insert(toy.program, plan), plan, counter=counter)
        for _ in range(RUNS):
            x = torch.randn(4, 96)
            torch.testing.assert_close(executor.run(x), toy.eager(x))
            assert executor.last_run is not None
            peaks.append(sorted(executor.last_run.peak_bytes.items()))
    assert peaks[1:] == peaks[1:2] * (RUNS - 1)


def test_an_error_names_its_op(tmp_path: Path, counter: Counter) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, residents=frozenset(toy.weights))
    module = insert(toy.program, plan)
    faulty = [""]

    def relu(x: torch.Tensor, name: str) -> torch.Tensor:
        if name == faulty[0]:
            raise ArithmeticError(name)
        result: torch.Tensor = aten.relu.default(x)
        return result

    names = [node.name for node in module.graph.nodes if node.target is aten.relu.default]
    for node in module.graph.nodes:
        if node.name in names:
            node.target, node.args = relu, (*node.args, node.name)
    with toy.session(plan) as session:
        executor = Executor(session, module, plan, counter=counter)
        for i in range(RUNS + len(names)):
            x, faulty[0] = torch.randn(4, 96), names[i - RUNS] if i >= RUNS else ""
            if i < RUNS:
                torch.testing.assert_close(executor.run(x), toy.eager(x))
                continue
            with pytest.raises(ArithmeticError) as raised:
                executor.run(x)
            assert any(f"'{faulty[0]}'" in note for note in raised.value.__notes__)


def test_lists_slices_keywords_and_inputs_that_are_written_to(
    tmp_path: Path, counter: Counter
) -> None:
    def body(p: dict[str, torch.fx.Proxy], *given: torch.fx.Proxy) -> Sequence[torch.fx.Proxy]:
        x, past, at = given
        parts = call(x, aten.split.Tensor, x, 2)
        some = [call(x, operator.getitem, parts, i) for i in range(3)]
        joined = call(x, aten.cat.default, [some[2], some[0], some[0]], dim=0)
        rows = call(x, aten.sym_size.int, joined, 0)
        biased = call(x, aten.linear.default, joined, weight=p["w"])
        picked = call(x, operator.getitem, biased, (slice(None, rows, 2), slice(1, 3)))
        filled = call(x, aten.full.default, [rows, 2], 1.5, dtype=torch.float64)
        written = call(x, aten.index_copy_.default, past, 0, at, some[1])
        again = call(x, aten.mul_.Tensor, written, 0.5)
        return picked, filled, again, call(x, aten.neg.default, again)

    w = torch.randn(6, 4, dtype=torch.float64)
    x, at = torch.randn(6, 4, dtype=torch.float64), torch.tensor([3, 1])
    past = torch.randn(5, 4, dtype=torch.float64)
    toy, plan, session = build(tmp_path, {"w": w}, [x, past, at], body)
    with session:
        executor = Executor(session, insert(toy.program, plan), plan, counter=counter)
        for _ in range(RUNS):
            ours, eagers = past.clone(), past.clone()
            found = executor.run(x, ours, at)
            torch.testing.assert_close(found, toy.eager(x, eagers, at))
            assert found[2] is ours
            torch.testing.assert_close(ours, eagers)


_X, _Y, _W = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 4)
_Q, _POSITIONS = torch.randn(1, 2, 3, 4), torch.tensor([0, 2])
_B = torch.randn(4)
_SAMPLES: dict[object, tuple[Any, ...]] = {
    aten._log_softmax.default: (_X, -1, False),
    aten._softmax.default: (_X, -1, False),
    aten.addmm.default: (_B, _X, _W, {"beta": 0.5, "alpha": 2}),
    aten.arange.default: (5, {"dtype": torch.int32, "device": torch.device("cpu")}),
    aten.bmm.default: (_Q[0], _Q[0].transpose(1, 2)),
    aten.cat.default: ([_X, _Y], -1),
    aten.div.Tensor: (_X, 3),
    aten.embedding.default: (_W, _POSITIONS, 1),
    aten.expand.default: (_B, [3, 4]),
    aten.gelu.default: (_X, {"approximate": "tanh"}),
    aten.index_copy_.default: (_X.clone(), 0, _POSITIONS, _Y[:2]),
    aten.layer_norm.default: (_X, [4], _B, _B, 1e-3),
    aten.linear.default: (_X, _W, _B),
    aten.matmul.default: (_X, _W),
    aten.mean.dim: (_X, [-1], True),
    aten.mm.default: (_X, _W),
    aten.mul.Tensor: (_X, 2),
    aten.narrow.default: (_Q, 2, 1, 2),
    aten.native_layer_norm.default: (_X, [4], _B, None, 1e-3),
    aten.permute.default: (_Q, [0, 2, 1, 3]),
    aten.pow.Tensor_Scalar: (_X, 2),
    aten.reshape.default: (_Q, [-1, 4]),
    aten.scaled_dot_product_attention.default: (_Q, _Q, _Q, None, 0.0, True, {"scale": 0.3}),
    aten.select.int: (_Q, 2, -1),
    aten.softmax.int: (_X, -1, torch.float64),
    aten.sub.Tensor: (_X, _Y, {"alpha": 2}),
    aten.add.Tensor: (_X, 1e-6),
    aten.sum.dim_IntList: (_X, [0], True),
    aten.t.default: (_X,),
    aten.transpose.int: (_Q, 1, 2),
    aten.unsqueeze.default: (_X, -1),
    aten.view.default: (_X, [2, -1]),
    aten.where.self: (_X > 0, _X, _Y),
}


@pytest.mark.parametrize("target", [t for t in _DIRECT if str(t).startswith("aten.")], ids=str)
def test_what_is_called_in_the_place_of_an_op_does_the_same(target: Any) -> None:
    *args, last = _SAMPLES.get(target, (_X,))
    kwargs = last if isinstance(last, dict) else {}
    args += [] if isinstance(last, dict) else [last]
    found, wanted = direct(target)(*args, **kwargs), target(*args, **kwargs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.is_tensor(found) is torch.is_tensor(wanted)
    if torch.is_tensor(found):
        assert (found.stride(), found.dtype) == (wanted.stride(), wanted.dtype)
