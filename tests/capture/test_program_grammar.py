"""Programs that a file may not hold: each is refused before any of it is run."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gascompile.capture.export import capture
from gascompile.capture.saved.program_io import load_treespec, program_from_json, program_to_json
from gascompile.core.errors import FormatError

LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


class Net(nn.Module):
    """A linear layer, a sum and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + x
        return found


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    data: dict[str, Any] = program_to_json(capture(Net().eval(), (torch.ones(2, 4),), {}).program)
    return data


def test_a_captured_program_is_read_again(program: dict[str, Any]) -> None:
    data = json.loads(json.dumps(program))
    assert program_to_json(program_from_json(data)) == program


def op(target: str, *args: Any, **kwargs: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data["nodes"][-1] |= {"target": target, "args": list(args), "kwargs": kwargs}

    return change


def field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update({name: value})


X = {"node": "x"}
REFUSED = [
    (op("aten.from_file.default", "/etc/passwd", False, 1), "none of those that data may call"),
    (op("inductor._reinterpret_tensor.default", X, {"list": [4]}, {"list": [1]}, 1 << 30), "none of those"),
    (op("aten.set_.source_Tensor", X, X), "none of those"),
    (op("aten.resize_.default", X, {"list": [1 << 40]}), "none of those"),
    (op("os.system.default", "true"), "none of those"),
    (op("aten.add.out", X, X, out=X), "takes what no file can hold"),
    (op("aten.add.Tensor", X, X, **{"alpha\rimport this": 1}), "has no argument"),
    (op("aten.add.Tensor", X), "needs 'other'"),
    (op("aten.add.Tensor", X, X, X), "takes 'alpha' by its name"),
    (op("aten.add.Tensor", X, "x"), "'other' of aten.add.Tensor is a Tensor"),
    (op("aten.gelu.default", X, approximate="tanh\r"), "'approximate' of aten.gelu.default is a str"),
    (op("aten.to.dtype", X, {"dtype": "quint8"}), "'dtype' of aten.to.dtype is a ScalarType"),
    (op("aten.empty.memory_format", {"list": [1 << 64]}), "'size' of"),
    (op("operator.getitem", X, {"list": []}), "number of its element"),
    (op("operator.pow", 9, 10**9), "an exponent is a number up to"),
    (op("aten.bernoulli.default", X), "draw random numbers, and others are listed"),
    (lambda data: data["nodes"][-1].update(name="a b"), "the node name 'a b' is not usable"),
    (lambda data: data["nodes"][-1].update(name="x"), "stands twice"),
    (lambda data: data["nodes"][-1].update(name="self"), "the node name 'self' is not usable"),
    (lambda data: data["inputs"][0].update(dtype="quint8"), "no dtype that a program may have"),
    (lambda data: data["inputs"][0].update(shape=[1 << 60]), "no shape of a tensor"),
    (lambda data: data["bound"].update({"%x": data["bound"]["layer.bias"]}), "called like the result of an op"),
    (lambda data: data["bound"].update({"x[0:1]": data["bound"]["layer.bias"]}), "called like the result of an op"),
    (field("outputs", [X, X]), "a result has 1 parts, the program 2"),
    (field("states", ["nobody"]), "of no weight of the program"),
    (field("more", 1), "unknown or missing"),
    (field("name", "a\nb"), "no name of a model"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_no_program_may_hold(
    program: dict[str, Any], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = copy.deepcopy(program)
    change(data)
    with pytest.raises(FormatError, match=message.replace("(", r"\(")):
        program_from_json(data)


def test_ops_beside_torchs_are_called_where_code_is_allowed(program: dict[str, Any]) -> None:
    library = torch.library.Library("gascompile_test_grammar", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    data = copy.deepcopy(program)
    op("gascompile_test_grammar.twice.default", X)(data)
    with pytest.raises(FormatError, match="allow_code=True"):
        program_from_json(data)
    assert program_from_json(data, allow_code=True).op_nodes()


FACTORY = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": ["a"]}  # fmt: skip
ENUM = '[{"__enum__": true, "fqn": "antigravity:x", "name": "y"}]'


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("collections.defaultdict", FACTORY),
        ("collections.defaultdict", {**FACTORY, "default_factory_module": "builtins", "default_factory_name": "eval"}),
        ("builtins.dict", ENUM),
        ("antigravity.x", "null"),
        ("antigravity.x", ENUM),
        ("torch.fx.immutable_collections.immutable_list", "null"),
        ("transformers.antigravity.X", '["a"]'),
        ("transformers.models.bert.antigravity.X", '["a"]'),
        ("collections.namedtuple", "antigravity.x"),
        ("collections.deque", "-1"),
        ("builtins.dict", '["a", "b"]'),
        (7, "null"),
    ],
)  # fmt: skip
def test_a_structure_names_no_type_that_is_not_known(name: Any, context: Any) -> None:
    spec = json.dumps([1, {"type": name, "context": context, "children_spec": [LEAF]}])
    with pytest.raises(FormatError):
        load_treespec(spec)
    assert "antigravity" not in sys.modules


def test_a_structure_that_is_nested_too_deeply_is_refused() -> None:
    text = '{"type": "builtins.list", "context": "null", "children_spec": ['
    with pytest.raises(FormatError, match="nested too deeply"):
        load_treespec(f"[1, {text * 3000}{json.dumps(LEAF)}{']}' * 3000}]")
