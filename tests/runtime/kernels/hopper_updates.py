"""Compiles the kernels of optimizer updates as ``hopper`` compiles the others; run as a module."""

from __future__ import annotations

import contextlib

import torch
from triton.runtime.jit import JITFunction

from gascompile.runtime.kernels import adam, sgd, state_codes
from gascompile.runtime.kernels.updates import AdamOptions, SgdOptions
from tests.runtime.kernels.hopper import compile_for_target


def main() -> None:
    """Compile each kernel in each of its forms and print what came out."""
    JITFunction.run = compile_for_target
    for module in (adam, sgd):
        vars(module)["launch_device"] = lambda tensor: contextlib.nullcontext()
    value, gradient, mean, square = (torch.empty(4096) for _ in range(4))
    coded = state_codes.parts(torch.zeros(state_codes.coded_bytes(4096), dtype=torch.uint8))
    for decoupled, scale in ((True, None), (False, torch.ones(()))):
        options = AdamOptions(
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.1,
            maximize=not decoupled,
            decoupled=decoupled,
            step=1,
        )
        adam.adam(value, gradient, mean, square, options, scale=scale)
        adam.adam_coded(value, gradient, (coded, coded), options, scale=scale)
    for momentum, is_first in ((None, False), (mean, False), (mean, True)):
        plain = SgdOptions(
            lr=1e-3,
            momentum=0.9,
            dampening=0.0,
            weight_decay=0.1,
            nesterov=not is_first,
            maximize=False,
            is_first=is_first,
        )
        sgd.sgd(value, gradient, momentum, plain)
        if momentum is not None:
            sgd.sgd_coded(value, gradient, coded, plain)


if __name__ == "__main__":
    main()
