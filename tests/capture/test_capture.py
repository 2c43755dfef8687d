"""Capture: the graph computes what the module computes, whatever the module does with its tensors."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch._export.passes import replace_set_grad_with_hop_pass
from torch._export.utils import _collect_all_valid_cia_ops
from torch.utils import _pytree as pytree

from gascompile.capture.calls import bind_call, normalize_call
from gascompile.capture.export import capture
from gascompile.capture.record.kept_watches import _codes
from gascompile.capture.record.record import CaptureRecord
from gascompile.capture.saved.program_io import program_from_json, program_to_json
from gascompile.capture.to_program import Capture
from gascompile.core.errors import CaptureError
from gascompile.core.program import Dim, Program
from gascompile.integrations.huggingface import register_pytrees
from tests import zoo


def run(found: Capture, model: nn.Module, kwargs: dict[str, Any], program: Program) -> list[Any]:
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **found.constants}
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    bound = [tensors[name] for name in program.bindings.values()]
    with torch.no_grad():
        return list(
            program.graph_module(*bound, *pytree.tree_leaves(normalize_call(model, (), kwargs)))
        )


@pytest.mark.parametrize("name", zoo.CASES)
def test_program_and_its_json_equal_eager(name: str) -> None:
    model, kwargs = zoo.make(name)
    register_pytrees()
    with torch.no_grad():
        expected = [v for v in pytree.tree_leaves(model(**kwargs)) if isinstance(v, torch.Tensor)]
    found = capture(model, *normalize_call(model, (), kwargs))
    reread = program_from_json(program_to_json(found.program))
    for program in (found.program, reread):
        outputs = run(found, model, kwargs, program)
        tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
        for output, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(output, wanted)
    assert [node.name for node in reread.op_nodes()] == [
        node.name for node in found.program.op_nodes()
    ]


class _Helped(nn.Module):
    @torch.no_grad()
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale(x) + 1).relu()


def test_gradients_that_are_switched_to_what_they_are_cut_no_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuts = []
    cut = vars(replace_set_grad_with_hop_pass)["sequential_split"]

    def seen(*args: Any, **options: Any) -> Any:
        cuts.append(args)
        return cut(*args, **options)

    monkeypatch.setattr(replace_set_grad_with_hop_pass, "sequential_split", seen)
    model, kwargs = _Helped().eval(), {"x": torch.randn(3, 4)}
    with torch.no_grad():
        torch.export.export(model, (), kwargs)
    assert len(cuts) == 1, "or this shows nothing"
    found = capture(model, (), kwargs)
    assert len(cuts) == 1
    (output,) = run(found, model, kwargs, found.program)
    assert torch.equal(output, model(**kwargs))


@pytest.mark.parametrize("overload", [False, True], ids=["op", "overload"])
def test_the_first_use_of_an_op_is_no_effect(*, overload: bool) -> None:
    """torch looks its name up and keeps it; what a library takes with it when it goes leaves nothing behind."""
    with torch.library._scoped_library("op_names_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")

        class Twice(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                if overload:
                    return torch.ops.op_names_tests.twice.default(x)
                return torch.ops.op_names_tests.twice(x)

        model, x = Twice(), torch.randn(3)
        found = capture(model, (), {"x": x})
        assert isinstance(found.record, CaptureRecord)
        assert found.record.is_reproducible, found.record.why
        assert torch.equal(run(found, model, {"x": x}, found.program)[0], 2 * x)
        assert list(torch.ops.op_names_tests) == ["twice"]
    assert not list(torch.ops.op_names_tests)
    # What fails where a name is left, as at the first import of Inductor's decompositions.
    assert _collect_all_valid_cia_ops()


def test_meta_weights_are_never_needed() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 16)  # 256 GiB
    program = capture(model, (), {"input": torch.zeros(1, 1 << 20)}).program
    assert program.bound["weight"].size_bytes == 1 << 38


def test_mutated_buffers_are_states() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.register_buffer("fixed", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("count").view(2, 2)[0].add_(1)
            return x + self.get_buffer("count") * self.get_buffer("fixed")

    program = capture(Counter(), (), {"x": torch.zeros(4)}).program
    assert program.states == {"count"}


def test_training_batchnorm_statistics_are_states() -> None:
    program = capture(nn.BatchNorm1d(3).train(), (), {"input": torch.randn(4, 3)}).program
    assert program.states == {"running_mean", "running_var", "num_batches_tracked"}


def test_dynamic_dimension_keeps_its_range() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    model = nn.Linear(4, 4)
    found = capture(model, (), {"input": torch.randn(8, 4)}, dynamic_shapes={"input": {0: batch}})
    (spec,) = found.program.inputs
    assert isinstance(spec.shape[0], Dim)
    assert (spec.shape[0].minimum, spec.shape[0].maximum) == (2, 64)
    assert spec.upper_shape() == (64, 4)
    x = torch.randn(5, 4)
    assert torch.equal(run(found, model, {"input": x}, found.program)[0], model(x))


def test_dynamic_dimension_without_maximum_is_refused() -> None:
    batch = torch.export.Dim("batch")
    with pytest.raises(CaptureError, match="has no maximum"):
        capture(
            nn.Linear(4, 4), (), {"input": torch.randn(8, 4)}, dynamic_shapes={"input": {0: batch}}
        )


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


def test_data_dependent_branch_names_the_line() -> None:
    with pytest.raises(
        CaptureError, match=r"test_capture\.py:\d+.*if x\.sum\(\) > 0.*torch\.where"
    ) as error:
        capture(Branching(), (), {"x": torch.ones(3)})
    assert "Branching cannot be captured" in str(error.value)


def test_calls_meet_in_one_form() -> None:
    names = ("x", "mask")
    same = [
        bind_call(names, (1, 2), {}),
        bind_call(names, (1,), {"mask": 2}),
        bind_call(names, (), {"mask": 2, "x": 1}),
    ]
    assert same[0] == same[1] == same[2] == ((), {"x": 1, "mask": 2})
    assert list(same[2][1]) == ["x", "mask"]
    with pytest.raises(TypeError, match="'x' is given by position and by name"):
        bind_call(names, (1,), {"x": 2})


class _Constants(nn.Module):
    """A constant of the code that is read, one that is written to, and one that is returned."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        read, returned, viewed = (torch.tensor([1.0, 2.0]) for _ in range(3))
        written = torch.tensor([3.0, 4.0])
        written += x
        return x * read, written, returned, viewed[1:] * 1, torch.cat([torch.tensor([]), x])


def test_constants_are_copied_only_where_they_have_to_be() -> None:
    model, x = _Constants(), torch.tensor([5.0, 6.0])
    found = capture(model, (), {"x": x})
    copies = [n for n in found.program.op_nodes() if "lift_fresh_copy" in str(n.target)]
    assert len(copies) == 3, "written, returned and viewed ones"
    for _ in range(2):
        for output, wanted in zip(
            run(found, model, {"x": x}, found.program), model(x), strict=True
        ):
            assert torch.equal(output, wanted)


def test_code_is_looked_for_past_objects_that_warn() -> None:
    """As torch's own deprecated ones do, whatever they are asked."""

    class Deprecated:
        def __getattribute__(self, name: str) -> Any:
            raise FutureWarning(f"somebody asked for {name}")

    class Holder:
        warns = Deprecated()

        @property
        def one(self) -> int:
            return 1

        @classmethod
        def two(cls) -> int:
            return 2

        @staticmethod
        def three() -> int:
            return 3

    module = types.ModuleType("holds")
    Holder.__module__ = "holds"
    vars(module)["Holder"] = Holder
    assert {code.co_name for code in _codes("holds", module)} == {"one", "two", "three"}
