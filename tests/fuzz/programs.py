"""Random programs: straight lines of views, ops in place and ops over the inputs, weights and buffers of a module."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Value = torch.Tensor
Line = tuple[str, Callable[..., Value], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Op:
    """A kind of op: how many tensors it takes, which it can take, and what it does; ``draw`` chooses its numbers."""

    name: str
    takes: int
    fits: Callable[..., bool]
    draw: Callable[[random.Random, Any], Callable[..., Value]]
    is_view: bool = False
    writes: bool = False


def _fixed(function: Callable[..., Value]) -> Callable[[random.Random, Any], Callable[..., Value]]:
    return lambda _rng, _values: function


def _any(*_: Value) -> bool:
    return True


def _matrix(x: Value) -> bool:
    return x.dim() == 2


def _several(x: Value) -> bool:
    return x.dim() >= 2


def _some(x: Value) -> bool:
    return x.dim() >= 1 and x.shape[0] >= 2


def _broadcasts(x: Value, y: Value) -> bool:
    try:
        return bool(torch.broadcast_shapes(x.shape, y.shape) == x.shape)
    except RuntimeError:
        return False


def _alike(x: Value, y: Value) -> bool:
    return x.shape == y.shape and x.dim() >= 1


def _wide(x: Value) -> bool:
    return x.dim() >= 1 and int(x.shape[-1]) == 8


def _set_rows(x: Value) -> Value:
    x[:1] = 0.5
    return x


def _sliced(rng: random.Random, values: list[Value]) -> Callable[..., Value]:
    step, start = rng.randint(1, 2), rng.randrange(values[0].shape[0])
    return lambda x: x[start::step]


def _expanded(rng: random.Random, values: list[Value]) -> Callable[..., Value]:
    count, shape = rng.randint(1, 3), values[0].shape
    return lambda x: x.unsqueeze(0).expand(count, *shape)


VIEWS = (
    Op("t", 1, _matrix, _fixed(lambda x: x.t()), is_view=True),
    Op("mT", 1, _several, _fixed(lambda x: x.transpose(-1, -2)), is_view=True),
    Op("unsqueeze", 1, _any, _fixed(lambda x: x.unsqueeze(-1)), is_view=True),
    Op("squeeze", 1, _any, _fixed(lambda x: x.squeeze()), is_view=True),
    Op("slice", 1, _some, _sliced, is_view=True),
    Op("expand", 1, lambda x: x.dim() <= 3, _expanded, is_view=True),
    Op("select", 1, _some, _fixed(lambda x: x[1]), is_view=True),
    Op("chunk", 1, _some, _fixed(lambda x: x.chunk(2)[1]), is_view=True),
    Op("diagonal", 1, _several, _fixed(lambda x: x.diagonal()), is_view=True),
    Op("reshape", 1, _any, _fixed(lambda x: x.reshape(-1)), is_view=True),
    Op("detach", 1, _any, _fixed(lambda x: x.detach()), is_view=True),
    Op("contiguous", 1, _any, _fixed(lambda x: x.contiguous()), is_view=True),
)
"""What may return its operand, or what lies in its memory."""
NEW = (
    Op("add", 1, _any, _fixed(lambda x: x + 1)),
    Op("tanh", 1, _any, _fixed(lambda x: x.tanh())),
    Op("sum", 1, _several, _fixed(lambda x: x.sum(0))),
    Op("flip", 1, _some, _fixed(lambda x: x.flip(0))),
    Op("cumsum", 1, _some, _fixed(lambda x: x.cumsum(0))),
    Op("sort", 1, _some, _fixed(lambda x: x.sort(0).values)),
    Op("softmax", 1, _some, _fixed(lambda x: x.softmax(0))),
    Op("clone", 1, _any, _fixed(lambda x: x.clone())),
    Op("mul", 2, _broadcasts, _fixed(lambda x, y: x * y)),
    Op("where", 2, _alike, _fixed(lambda x, y: torch.where(x > y, x, y))),
    Op("cat", 2, _alike, _fixed(lambda x, y: torch.cat([x, y]))),
    Op("linear", 2, lambda x, y: _wide(x) and y.shape == (8, 8), _fixed(functional.linear)),
)
"""What returns memory of its own."""
WRITES = (
    Op("add_", 1, _any, _fixed(lambda x: x.add_(0.5)), writes=True),
    Op("mul_", 1, _any, _fixed(lambda x: x.mul_(0.5)), writes=True),
    Op("relu_", 1, _any, _fixed(lambda x: x.relu_()), writes=True),
    Op("set rows", 1, _some, _fixed(_set_rows), writes=True),
    Op("copy_", 2, _broadcasts, _fixed(lambda x, y: x.copy_(y.clone())), writes=True),
    Op("masked_fill_", 1, _any, _fixed(lambda x: x.masked_fill_(x > 1, 0.25)), writes=True),
    Op("t_", 1, _matrix, _fixed(lambda x: x.t_()), writes=True),
    Op("squeeze_", 1, _any, _fixed(lambda x: x.squeeze_()), writes=True),
)
"""What changes its operand in place, and returns it."""


class Program(nn.Module):
    """Runs lines over its inputs, a weight and a buffer, and returns some of the values."""

    kept: Value

    def __init__(self, lines: tuple[Line, ...], results: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))
        self.register_buffer("kept", torch.linspace(-2, 2, 32).reshape(4, 8))
        self.lines, self.results = lines, results

    def forward(self, *inputs: Value) -> Any:
        values: list[Any] = [*inputs, self.weight, self.kept]
        for _, function, operands in self.lines:
            values.append(function(*(values[i] for i in operands)))
        first, *others = (values[i] for i in self.results)
        return {"first": first, "others": others}


WEIGHT = 2
"""Where the weight is among the values: after two inputs."""


def inputs_of(rng: random.Random) -> tuple[Value, Value]:
    """Return two inputs, of which the second may be the first, a view of it, or laid out in another way."""
    made = torch.Generator().manual_seed(rng.randrange(1 << 30))
    x = torch.randn(rng.choice((1, 2, 4)), 8, generator=made)
    y = torch.randn(4, 8, generator=made)
    kind = rng.randrange(6)
    if kind == 0:
        return x, x
    if kind == 1:
        return x, x[:, ::2]
    if kind == 2:
        return x, torch.randn(8, 4, generator=made).t()
    if kind == 3:
        return torch.empty_strided((1, 8), (3, 1)).copy_(x[:1]), y
    return x, y


def _overlaps(x: Value) -> bool:
    """Return whether elements share memory, as no op may write to them."""
    return any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))


def program_of(rng: random.Random, inputs: tuple[Value, Value]) -> Program:
    """Return a program that eager runs on ``inputs``, which it may write to."""
    values: list[Value] = [*inputs]
    empty = Program((), (0,))
    values += [empty.weight.detach(), empty.get_buffer("kept")]
    from_weight = {WEIGHT}
    lines: list[Line] = []
    for _ in range(rng.randint(3, 12)):
        op = rng.choice(rng.choice((VIEWS, NEW, WRITES)))
        operands = tuple(rng.randrange(len(values)) for _ in range(op.takes))
        taken = [values[i] for i in operands]
        if not op.fits(*taken):
            continue
        # What is trained is not written to here, nor what many elements lie in.
        if op.writes and (operands[0] in from_weight or _overlaps(taken[0])):
            continue
        function = op.draw(rng, taken)
        try:
            values.append(function(*taken))
        except RuntimeError:
            continue  # memory that overlaps in other ways
        if (op.is_view or op.writes) and operands[0] in from_weight:
            from_weight.add(len(values) - 1)
        lines.append((op.name, function, operands))
    count = rng.randint(1, 4)
    return Program(tuple(lines), tuple(rng.randrange(len(values)) for _ in range(count)))


def texts(program: Program) -> str:
    """Return a program as it is read."""
    rows = (f"v{i + 4} = {name}{operands}" for i, (name, _, operands) in enumerate(program.lines))
    return "; ".join([*rows, f"return {program.results}"])


def tensors_of(value: Any) -> Iterator[Value]:
    """Yield the tensors of a result."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
    for part in parts:
        yield from tensors_of(part)
