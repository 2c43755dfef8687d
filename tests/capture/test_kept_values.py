"""Values that modules keep of their calls: they are copied for a trace, and nobody takes an old one for a new one."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError


class Keeping(nn.Module):
    """Keeps what it computed last, for whoever looks at it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last: torch.Tensor = self.layer(x)
        made: torch.Tensor = self.last.relu()
        return made


class Lists(Keeping):
    """Keeps it where no attribute shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = {"all": [super().forward(x)]}
        return self.kept["all"][0] * 2


@pytest.mark.parametrize("kind", [Keeping, Lists])
def test_a_model_that_has_run_with_gradients_is_compiled(
    kind: type[Keeping], tmp_path: Path
) -> None:
    model, eager = kind().eval(), kind().eval()
    x = torch.randn(3, 8)
    model(x)
    before = model.last
    assert before.grad_fn is not None
    with gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled, torch.no_grad():
        for count in (3, 2, 3):
            assert torch.equal(compiled(x[:count]), eager(x[:count]))
    assert model.last is before


def test_what_modules_keep_of_planned_calls_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Keeping()).eval()
    with (
        caplog.at_level(logging.WARNING, logger="gascompile"),
        gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled,
        torch.no_grad(),
    ):
        compiled(torch.randn(3, 8))
    assert "sets 1.last to tensors that it computes, which planned calls do not" in caplog.text
    assert not hasattr(model[1], "last")


def test_layers_that_keep_no_values_are_told_of_in_no_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.LSTM(4, 4).eval()
    with (
        caplog.at_level(logging.WARNING, logger="gascompile"),
        gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled,
        torch.no_grad(),
    ):
        compiled(torch.randn(3, 2, 4))
    assert "to tensors that it computes" not in caplog.text
    assert not any("assigned during export" in str(warning.message) for warning in recwarn)


class Chained(nn.Module):
    """Reads what it counted three calls ago."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.a = self.b = self.c = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old, self.c, self.b, self.a = self.c, self.b, self.a, self.a + 1
        made: torch.Tensor = self.layer(x) * (3 if old > 0 else 1)
        return made


class ChainedValues(nn.Module):
    """Adds what it computed three calls ago, by attributes that are not there at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.zeros = torch.zeros(3, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old: torch.Tensor = getattr(self, "c", self.zeros)
        self.c = getattr(self, "b", self.zeros)
        self.b = getattr(self, "a", self.zeros)
        self.a: torch.Tensor = self.layer(x)
        made: torch.Tensor = old + self.a
        return made


class Remembered(nn.Module):
    """Gives the last result again where it is given the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.x: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.x is not x:
            self.x = x
            self.y: torch.Tensor = self.layer(x)
        return self.y


class Shapes(nn.Module):
    """Decides by the shape of what it computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.last = torch.zeros(1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) * (3 if self.last.shape[0] > 4 else 1)
        self.last = made
        return made


class OneShot(Chained):
    """Computes something else once."""

    def __init__(self) -> None:
        super().__init__()
        self.first: torch.Tensor | None = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) * (3 if self.first is not None else 1)
        self.first = None
        return made


class Twins(Chained):
    """Asks whether two values are one, which they are from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.zeros(1), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 3 if self.one is self.other else 1
        self.one = self.other = self.layer(x)
        return self.one * factor


class LateTwins(Chained):
    """Asks whether two values are one, which they are from the fourth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.p3, self.p2, self.p1, self.q3, self.q2, self.q1 = (torch.zeros(3, 8) for _ in "123456")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor, made = 3 if self.p3 is self.q3 else 1, self.layer(x)
        self.p3, self.p2, self.p1 = self.p2, self.p1, made
        self.q3, self.q2, self.q1 = self.q2, self.q1, made
        return self.p1 * factor


class Typed(Chained):
    """Asks for the type of what it keeps, which is another one from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.zeros(1)
        self.other: object = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1 if isinstance(self.other, int) else 3
        self.other = self.one
        self.one = self.layer(x)
        return self.one * factor


class Dimmed(Chained):
    """Sets a number to None."""

    number: int | None = 1

    def __init__(self) -> None:
        super().__init__()
        self.number = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) * (3 if self.number is not None else 1)
        self.number = None
        return made


@pytest.mark.parametrize(
    "kind",
    [Chained, ChainedValues, Remembered, Shapes, OneShot, Twins, LateTwins, Typed, Dimmed],
)
def test_what_reaches_a_later_call_is_refused(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind().eval()
    x = torch.randn(3, 8)
    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match="may compute something else at every call"),
        gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled,
    ):
        compiled(x)


class Counted(Chained):
    """Keeps how often it was called before, which it does not read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b, self.a = self.a, self.a + 1
        made: torch.Tensor = self.layer(x)
        return made


def test_what_takes_a_counters_value_is_let_go_with_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Counted().eval()
    torch.manual_seed(0)
    eager = Counted().eval()
    with gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled, torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 8)
            assert torch.equal(compiled(x), eager(x))


class Signatures(Chained):
    """Counts in calls of three rows what it reads in others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        if x.shape[0] == 2:
            return made * (3 if self.b > 0 else 1)
        self.b, self.a = self.a, self.a + 1
        return made


def test_what_calls_of_another_shape_read_is_refused(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    model = Signatures().eval()
    with gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled, torch.no_grad():
        compiled(x)
        compiled(x)
        with pytest.raises(CaptureError, match="may compute something else at every call"):
            compiled(x[:2])


class OfClass(Counted):
    """Counts from what its class has."""

    a = 0

    def __init__(self) -> None:
        super().__init__()
        del self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a += 1
        made: torch.Tensor = self.layer(x)
        return made


class Marked(Keeping):
    """Has a table with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.layer.weight * 2
        self.table.scale = 3  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) * getattr(self.table, "scale", 1)
        return made * 5 if self.table.requires_grad else made


@pytest.mark.parametrize("kind", [OfClass, Marked])
def test_what_is_kept_answers_as_it_does(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    torch.manual_seed(0)
    eager = kind().eval()
    with gascompile.compile(model, "8MiB", cache_dir=tmp_path) as compiled, torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 8)
            assert torch.equal(compiled(x), eager(x))


@pytest.mark.parametrize("kind", [Chained, Counted, Shapes])
def test_steps_keep_to_the_same(kind: type[nn.Module], tmp_path: Path) -> None:
    model, eager = kind(), kind()
    eager.load_state_dict(model.state_dict())
    x = torch.randn(3, 8)
    model(x)
    eager(x)

    def loss_fn(of: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = of(batch).square().mean()
        return loss

    optimizer, own = (torch.optim.SGD(of.parameters(), 0.1) for of in (model, eager))
    make = partial(gascompile.compile_step, model, loss_fn, optimizer, "8MiB", x)
    if kind is not Counted:
        with pytest.raises(CaptureError, match="may take another course"):
            make(cache_dir=tmp_path)
        return
    with make(cache_dir=tmp_path) as step:
        for _ in range(3):
            own.zero_grad()
            loss = loss_fn(eager, x)
            loss.backward()
            own.step()
            assert float(step(x)) == pytest.approx(loss.item(), abs=1e-6)
