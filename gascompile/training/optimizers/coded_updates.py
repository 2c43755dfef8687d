"""Optimizer updates as ops whose states are in 8 bits, on the wire and at rest; arithmetic is in float32.

A range is updated piece by piece: states are decoded into a small workspace, torch's fused kernel runs there, and
what comes out is coded again. On a GPU one kernel does all of it. ``runtime/kernels/state_codes.py`` says what the
codes are and what they cost in accuracy.

On one core of a server processor decoding and coding the two states of Adam takes 3 to 4 ns per parameter. It
saves 12 bytes of transfers, which a drive of 2 GB/s takes 6 ns for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gascompile.runtime.kernels import state_codes, updates
from gascompile.runtime.kernels.state_codes import BLOCK
from gascompile.runtime.kernels.updates import Coded
from gascompile.training.optimizers.update_ops import (
    PIECE,
    adam_options,
    is_laid_out_as,
    nothing,
    part_of,
    pieces,
    range_of,
    sgd_options,
)
from gascompile.training.optimizers.update_ops import workspace_bytes as plain_workspace_bytes

_library = torch.library.Library("gascompile_updates", "FRAGMENT")
_library.define(
    "adam_coded(Tensor(a!) parameter, Tensor gradient, Tensor(b!) mean, Tensor(c!) square, Tensor hyper, "
    "Tensor? scale, int begin, int end, bool decoupled, int row=0) -> ()"
)
_library.define(
    "sgd_coded(Tensor(a!) parameter, Tensor gradient, Tensor(b!) momentum, Tensor hyper, Tensor? scale, "
    "int begin, int end, int row=0) -> ()"
)


def workspace_bytes(
    parameter: torch.Tensor, gradient: torch.Tensor, num_elements: int, *, scaled: bool
) -> int:
    """Return what the update of a range of ``num_elements`` allocates at most, from layouts alone.

    Args:
        parameter: has the layout of the parameter.
        gradient: of its shape, or flat and of the range alone.
        num_elements: of the range.
        scaled: the gradient is multiplied, negated or added to before it is used.
    """
    own = updates.Workspace.size_bytes(min(num_elements, PIECE))
    return own + plain_workspace_bytes(parameter, gradient, num_elements, scaled=scaled)


def _blocks(state: torch.Tensor, begin: int, end: int) -> Coded:
    """Return the codes and scales of elements ``begin`` to ``end`` of a state."""
    codes, scales = state_codes.parts(state)
    rows = slice(begin // BLOCK, state_codes.num_blocks(end))
    return codes[rows], scales[rows]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from dividing pieces among threads, which wait for each other longer than a piece takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _adam_coded(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    hyper: torch.Tensor,
    scale: torch.Tensor | None,
    begin: int,
    end: int,
    decoupled: bool,
    row: int = 0,
) -> None:
    options = adam_options(hyper, row, decoupled=decoupled)
    on_gpu = parameter.is_cuda
    workspace = None if on_gpu else updates.Workspace(min(end - begin, PIECE), options.step)
    # Without a copy of the gradient a GPU takes the whole range at once.
    whole = on_gpu and is_laid_out_as(gradient, parameter)
    for first, last in pieces(begin, end, whole=whole):
        part, is_copy = part_of(parameter, gradient, begin, first, last)
        if scale is not None and not on_gpu:
            part = part.mul_(scale) if is_copy else part * scale
        updates.adam_coded(
            range_of(parameter, first, last),
            part,
            (
                _blocks(mean, first - begin, last - begin),
                _blocks(square, first - begin, last - begin),
            ),
            options,
            workspace,
            scale=scale if on_gpu else None,
        )
        del part  # so that the next piece takes its memory


def _sgd_coded(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    hyper: torch.Tensor,
    scale: torch.Tensor | None,
    begin: int,
    end: int,
    row: int = 0,
) -> None:
    options = sgd_options(hyper, row)
    on_gpu = parameter.is_cuda
    workspace = None if on_gpu else updates.sgd_workspace(min(end - begin, PIECE))
    whole = on_gpu and is_laid_out_as(gradient, parameter)
    for first, last in pieces(begin, end, whole=whole):
        part, is_copy = part_of(parameter, gradient, begin, first, last)
        updates.sgd_coded(
            range_of(parameter, first, last),
            part,
            _blocks(momentum, first - begin, last - begin),
            options,
            workspace,
            scale=scale,
            may_write=is_copy,
        )
        del part


def _adam_on_cpu(*args: Any) -> None:
    with _one_thread():
        _adam_coded(*args)


def _sgd_on_cpu(*args: Any) -> None:
    with _one_thread():
        _sgd_coded(*args)


for _name, _on_cpu, _on_gpu in (
    ("adam_coded", _adam_on_cpu, _adam_coded),
    ("sgd_coded", _sgd_on_cpu, _sgd_coded),
):
    _library.impl(_name, _on_cpu, "CPU")
    _library.impl(_name, _on_gpu, "CUDA")
    _library.impl(_name, nothing, "Meta")

adam_coded = torch.ops.gascompile_updates.adam_coded.default
sgd_coded = torch.ops.gascompile_updates.sgd_coded.default
