"""What torch notes of a trace, and what it makes of it, is the same in less time."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx, nn
from torch.fx import _lazy_graph_module, proxy

from gascompile.core.quick_traces import quick_traces


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return x * scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(4, 4)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(self.linear(x)).relu()


def exported() -> fx.GraphModule:
    model, x = Outer().eval(), torch.ones(2, 4)
    sizes = {"x": {0: torch.export.Dim("rows", min=2, max=8)}}
    program = torch.export.export(model, (x,), dynamic_shapes=sizes, strict=False)
    return cast(fx.GraphModule, program.graph_module)


def notes(module: fx.GraphModule) -> list[tuple[str, str | None]]:
    return [(node.name, node.meta.get("stack_trace")) for node in module.graph.nodes]


def test_notes_and_text_are_torchs_own() -> None:
    wanted = exported()
    with quick_traces():
        found = exported()
    assert notes(found) == notes(wanted)
    assert any("in forward" in (text or "") for _, text in notes(wanted))
    assert found.code == wanted.code
    x = torch.randn(3, 4)
    parameters = [torch.randn(4, 4), torch.randn(4)]
    assert all(map(torch.equal, found(*parameters, x), wanted(*parameters, x)))


def test_torch_is_as_before_when_the_last_is_gone() -> None:
    def is_lazy() -> bool:
        made = _lazy_graph_module._make_graph_module(nn.Module(), fx.Graph())
        return isinstance(made, _lazy_graph_module._LazyGraphModule)

    before = vars(proxy)["CapturedTraceback"]
    first, second = quick_traces(), quick_traces()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert vars(proxy)["CapturedTraceback"] is not before
    assert is_lazy()
    second.__exit__(None, None, None)
    assert vars(proxy)["CapturedTraceback"] is before
    assert not is_lazy()
