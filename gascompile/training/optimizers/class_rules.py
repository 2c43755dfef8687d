"""Optimizers whose updates are made by their own class, parameter by parameter or range by range.

A rule says what a class keeps per parameter, by which options of a group it updates, and whether it treats every
element by itself. Where it does, a parameter is updated a range at a time, as its states stream through memory;
where it does not (norms, products of matrices), at once. Rules are tried before they are trusted: ``rule_trials``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Lies = Literal["elements", "scalar", "kept rows", "kept columns", "rows", "columns"]
"""How a state lies: as the parameter; one number; the parameter without its last, or last but one, dimension."""
Group = Mapping[str, Any]

KERNELS = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose among kernels of torch."""
_LENGTHS = {"betas": 2, "eps": 2, "etas": 2, "step_sizes": 2, "ns_coefficients": 3}
"""Numbers in options that are tuples."""
_WORDS: tuple[str | None, ...] = (None, "original", "match_rms_adamw")
"""Values of options that are words, by the number that stands for each."""
_FLAGS = ("centered", "amsgrad", "maximize", "nesterov", "decoupled_weight_decay", "fused")
_FLAGS_TOO = ("scale_parameter", "relative_step", "warmup_init")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """What there is to know of one class."""

    name: str
    """Of the op."""
    module: str
    kind: str
    """Name of the class in its module."""
    options: tuple[str, ...]
    """All that the class reads of a group, but what chooses kernels."""
    tuples: tuple[str, ...] = ()
    """Those of them that are tuples of numbers."""
    keys: Callable[[Group], tuple[str, ...]]
    """Names of the states that a group's parameters have, without ``step``."""
    lies: Mapping[str, Lies]
    """Of states that do not lie as the parameter does, by name."""
    vector_keys: tuple[str, ...] = ()
    """The states of parameters of fewer than two dimensions, where those are others; ``lies`` knows the rest."""
    whole: bool = False
    """Whether an element's update depends on others."""
    counts: bool = True
    """Whether it keeps the number of a parameter's update as ``step``."""
    fused: bool = False
    """Whether torch's fused kernel is taken, whatever the group says."""
    first: Callable[[Group], Mapping[str, float]] = lambda _: {}
    """What states are filled with before the first update, where the class does that when it is made."""
    scratch: int = 5
    """Copies of a piece, or of a matrix, that an update makes; [Empirical] torch 2.13, of the first one."""
    square_scratch: float = 0
    """Copies of the square of a matrix's smaller dimension beside them."""

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is of this very class."""
        kind = type(optimizer)
        return (kind.__module__, kind.__qualname__) == (self.module, self.kind)

    def states(self, group: Group, num_dimensions: int) -> tuple[str, ...]:
        """Return the names of what is kept of a parameter, without ``step``."""
        keys = self.keys(group)
        if not self.vector_keys:
            return keys
        short = [key for key in keys if key not in self.vector_keys and self.lies.get(key)]
        gone = short if num_dimensions < 2 else self.vector_keys
        return tuple(key for key in keys if key not in gone)

    def like(self, key: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor on the meta device that lies as a state of ``parameter`` does."""
        shape = list(parameter.shape)
        match self.lies.get(key, "elements"):
            case "elements":
                strides = parameter.stride()
                return torch.empty_strided(shape, strides, dtype=torch.float32, device="meta")
            case "scalar":
                shape = []
            case "kept rows":
                shape[-1] = 1
            case "kept columns":
                shape[-2] = 1
            case "rows":
                del shape[-1]
            case "columns":
                del shape[-2]
        return torch.empty(shape, dtype=torch.float32, device="meta")

    def is_scalar(self, key: str) -> bool:
        """Return whether a state is one number, of which each range has a copy of its own."""
        return self.lies.get(key) == "scalar"

    @property
    def length(self) -> int:
        """Numbers that the options of a group take."""
        return sum(_LENGTHS[name] if name in self.tuples else 1 for name in self.options)

    def numbers(self, group: Group) -> list[float]:
        """Return the options of a group as numbers."""
        numbers: list[float] = []
        for name in self.options:
            value = group[name]
            numbers += map(_number, value if name in self.tuples else (value,))
        return numbers

    def values(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Return the options that ``numbers`` were made from."""
        options, at = {}, 0
        for name in self.options:
            count = _LENGTHS[name] if name in self.tuples else 1
            values = [_value(name, number) for number in numbers[at : at + count]]
            options[name] = tuple(values) if name in self.tuples else values[0]
            at += count
        return options

    def fixed(self, group: Group) -> list[object]:
        """Return what a program has in it of a group: another value needs another program."""
        return [list(self.keys(group)), sorted(self.first(group).items())]


def _number(value: object) -> float:
    if value is None or isinstance(value, str):
        # NaN stands for no number; words are those of one option.
        return math.nan if value is None else float(_WORDS.index(value))
    return float(value)  # type: ignore[arg-type]  # a number, or a tensor of one


def _value(name: str, number: float) -> float | bool | int | str | None:
    if math.isnan(number):
        return None
    if name in _FLAGS or name in _FLAGS_TOO:
        return bool(number)
    if name == "adjust_lr_fn":
        return _WORDS[int(number)]
    return int(number) if name == "ns_steps" else number
