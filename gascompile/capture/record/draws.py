"""Draws: functions that give one number of Python's or NumPy's random numbers, for which trials stand in."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

PYTHON, NUMPY = "Python's random numbers", "NumPy's random numbers"
_FLOATS = (
    "random", "uniform", "triangular", "betavariate", "expovariate", "gammavariate", "gauss", "lognormvariate",
    "normalvariate", "vonmisesvariate", "paretovariate", "weibullvariate",
)  # fmt: skip
_INTEGERS = ("randint", "randrange", "getrandbits")
_NUMPY = {"rand": 0, "randn": 0, "random": 0, "random_sample": 0, "uniform": 2, "normal": 2}
"""Functions of NumPy's that give one number, if they get no more arguments than this."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a function gives."""

    name: str
    """In words."""
    kind: type
    most_arguments: int | None = None
    """With more it gives an array."""
    source: str = ""
    """Whose random numbers it draws."""
    seeds: bool = False
    """Whether it determines those to come."""

    def is_number(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Return whether a call gives one number."""
        return self.most_arguments is None or (len(args) <= self.most_arguments and not kwargs)


def drawing_functions() -> dict[int, Drawn]:
    """Return what functions give, by their identity."""
    drawn_by = {
        id(getattr(random, name)): Drawn(f"what random.{name}() draws", kind, source=PYTHON)
        for kind, names in ((float, _FLOATS), (int, _INTEGERS))
        for name in names
    }
    for name, most in _NUMPY.items():
        drawn = Drawn(f"what numpy.random.{name}() draws", float, most, NUMPY)
        drawn_by[id(getattr(numpy.random, name))] = drawn
    for seed, source in ((random.seed, PYTHON), (numpy.random.seed, NUMPY)):
        drawn_by[id(seed)] = Drawn("a seed", int, source=source, seeds=True)
    return drawn_by


def random_states() -> dict[str, object]:
    """Return the states of Python's and NumPy's that all draw from, by their names."""
    numbers: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002 - the state that others draw from
    return {
        PYTHON: random.getstate(),
        NUMPY: (numbers[1].tobytes(), numbers[2:]),
    }


def all_random_states() -> dict[str, object]:
    """Return torch's, too, which cannot be read within a trace."""
    return {**random_states(), "torch's random numbers": torch.get_rng_state().numpy().tobytes()}
