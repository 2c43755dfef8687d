"""Prints what updates of states in 8 bits allocate and what is planned for them; run as a module."""

from __future__ import annotations

import itertools
import json

import torch

from gascompile.runtime.kernels import state_codes
from gascompile.runtime.kernels.state_codes import SIGNED, UNSIGNED
from gascompile.training.optimizers import coded_updates, update_ops
from tests.allocator import peak_growth_bytes

_HYPER = torch.tensor([0.1, 0.9, 0.99, 1e-8, 0.1, 1.0, 2.0]).double()


def measure(shape: tuple[int, int], kind: str, *, turned: bool) -> tuple[int, int]:
    """Return what the update of the second half of a parameter is planned to allocate, and what it does."""
    parameter = torch.randn(shape)
    gradient = torch.randn(shape[::-1]).t() if turned else torch.randn(shape)
    begin, end = update_ops.tiles(parameter.numel(), parameter.numel() // 2)[1]
    values = torch.rand(end - begin)
    mean, square = state_codes.coded(values, SIGNED), state_codes.coded(values, UNSIGNED)
    half = torch.tensor(0.5)
    scale = half if kind == "scaled adam" else None

    def call() -> None:
        place = (_HYPER, half if kind == "sgd" else scale, begin, end)
        if kind == "sgd":
            coded_updates.sgd_coded(parameter, gradient, mean, *place)
        else:
            coded_updates.adam_coded(parameter, gradient, mean, square, *place, True)

    planned = coded_updates.workspace_bytes(parameter, gradient, end - begin, scaled=kind != "adam")
    return planned, peak_growth_bytes(call)


def main() -> None:
    """Measure every kind over sizes above and below a piece, with gradients laid out both ways."""
    shapes = ((300, 500), (3, 70000), (40, 110))
    kinds = ("adam", "scaled adam", "sgd")
    for shape, kind, turned in itertools.product(shapes, kinds, (False, True)):
        planned, grown = measure(shape, kind, turned=turned)
        case = {"case": [list(shape), kind, turned], "planned": planned, "grown": grown}
        print(json.dumps(case))


if __name__ == "__main__":
    main()
