"""What code reads in the backward pass may change between steps, as in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError

STATE = {"alpha": 1.0}
ALPHA = 1.0
NUMBERS: list[float] = []
BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(5)]


class Reversed(torch.autograd.Function):
    """Turns gradients round, by a global."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -ALPHA * gradient


class OfModule(torch.autograd.Function):
    """Turns gradients round, by an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Net) -> torch.Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.module.alpha, None


class Counting(torch.autograd.Function):
    """Takes another gradient at each call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        NUMBERS.append(1.0)
        return gradient / len(NUMBERS)


def scaler(state: dict[str, float]) -> Any:
    """Return an op whose backward pass reads what it closes over."""

    @torch.library.custom_op("tests_backward_state::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @scaled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    scaled.register_autograd(lambda ctx, gradient: gradient * 2 * state["alpha"])
    return scaled


SCALED = scaler(STATE)
Middle = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, middle: Middle = lambda net, x: x) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)
        self.middle, self.alpha = middle, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.act(self.first(x))
        out: torch.Tensor = self.last(self.middle(self, hidden))
        return out


def applied(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    made: Any = function
    out: torch.Tensor = made.apply(*args)
    return out


def counted(module: nn.Module, ins: Any, outs: Any) -> tuple[torch.Tensor]:
    NUMBERS.append(1.0)
    return (ins[0] / len(NUMBERS),)


def by_global(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * ALPHA


def hooked(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(by_global)
    return y


def node_hooked(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * STATE["alpha"],))
    return y


def nested(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Take a gradient within the forward pass, of what reads a value in its backward pass."""
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(applied(Reversed, x).square().sum(), x, create_graph=True)
    return x + gradient


def of_act(register: str, hook: Callable[..., Any]) -> Callable[[], Net]:
    def build() -> Net:
        net = Net()
        getattr(net.act, register)(hook)
        return net

    return build


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = (model(batch) - 1).square().mean()
    return value


def losses(build: Callable[[], Net], folder: Path | None) -> list[torch.Tensor]:
    """Return the losses of steps between which all values are halved; eager's without a folder."""
    global ALPHA
    torch.manual_seed(0)
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    step = folder and gascompile.compile_step(
        net, square, optimizer, "64MiB", BATCHES[0], cache_dir=folder
    )
    ALPHA, STATE["alpha"] = 1.0, 1.0
    taken = []
    try:
        for batch in BATCHES:
            if step:
                taken.append(step(batch).detach().clone())
            else:
                optimizer.zero_grad()
                loss = square(net, batch)
                loss.backward()
                optimizer.step()
                taken.append(loss.detach())
            ALPHA, STATE["alpha"], net.alpha = ALPHA / 2, STATE["alpha"] / 2, net.alpha / 2
    finally:
        if step:
            step.close()
    return taken


READS: dict[str, Callable[[], Net]] = {
    "function, global": lambda: Net(lambda net, x: applied(Reversed, x)),
    "function, module": lambda: Net(lambda net, x: applied(OfModule, x, net)),
    "custom op, closure": lambda: Net(lambda net, x: SCALED(x)),
    "op by its name": lambda: Net(lambda net, x: torch.ops.tests_backward_state.scaled(x)),
    "tensor hook": lambda: Net(hooked),
    "node hook": lambda: Net(node_hooked),
    "nested gradient": lambda: Net(nested),
    "backward hook": of_act(
        "register_full_backward_hook", lambda module, ins, outs: (ins[0] * STATE["alpha"],)
    ),
    "backward pre-hook": of_act(
        "register_full_backward_pre_hook", lambda module, outs: (outs[0] * ALPHA,)
    ),
}


@pytest.mark.parametrize("name", READS)
def test_annealed_values_are_read_anew(name: str, tmp_path: Path) -> None:
    expected = losses(READS[name], None)
    got = losses(READS[name], tmp_path)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Net(lambda net, x: applied(Counting, x)),
        of_act(
            "register_full_backward_hook",
            counted,
        ),
    ],
)
def test_counters_that_matter_are_refused(build: Callable[[], Net], tmp_path: Path) -> None:
    NUMBERS.clear()
    with pytest.raises(CaptureError, match="may take another course at every call"):
        losses(build, tmp_path)


def test_logs_of_hooks_are_let_go(tmp_path: Path) -> None:
    kept: list[Any] = []
    build = of_act(
        "register_full_backward_hook", lambda module, ins, outs: kept.append(ins[0].norm())
    )
    expected = losses(build, None)
    kept.clear()
    torch.testing.assert_close(losses(build, tmp_path), expected, rtol=1e-6, atol=1e-7)
    assert not kept


def test_modules_keep_no_traced_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nets = []

    def build() -> Net:
        net = of_act(
            "register_full_backward_hook",
            lambda module, ins, outs: setattr(module, "size_of", ins[0].norm()),
        )()
        net.act.seen = None  # type: ignore[assignment]
        net.act.register_forward_hook(lambda module, ins, out: setattr(module, "seen", [out]))
        nets.append(net)
        return net

    expected = losses(build, None)
    assert vars(nets[0].act)["seen"] is not None
    torch.testing.assert_close(losses(build, tmp_path), expected, rtol=1e-6, atol=1e-7)
    assert vars(nets[1].act)["seen"] is None
    assert "size_of" not in vars(nets[1].act)
    assert "act.seen" in caplog.text
    assert "act.size_of" in caplog.text
