"""Compiles what the launchers would launch for a GPU of compute capability 9.0, on a machine that has none.

Run as a script, in a process whose Triton is not the interpreter: prints one JSON object per compiled kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gascompile.formats.layout import row_bytes
from gascompile.runtime.kernels import cast, dequantise, product
from gascompile.runtime.kernels.checks import DTYPES

TARGET = GPUTarget("cuda", 90, 32)
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
}


def main() -> None:
    """Compile each kernel in each of its forms and print what came out."""
    JITFunction.run = compile_for_target
    for module in (cast, dequantise, product):
        vars(module)["launch_device"] = lambda tensor: contextlib.nullcontext()
    for source, target in zip(DTYPES, reversed(DTYPES), strict=True):
        cast.cast_copy(
            torch.empty(64, 256, dtype=source)[:, 8:136], torch.empty(64, 128, dtype=target)
        )
    for form, group, target in (
        ("int8", 16, DTYPES[0]),
        ("int8", 64, DTYPES[1]),
        ("int9", 16, DTYPES[1]),
        ("int12", 16, DTYPES[0]),
        ("int4", 32, DTYPES[0]),
        ("int4", 128, DTYPES[1]),
    ):
        packed = torch.empty(64, row_bytes(form, 4096, group), dtype=torch.uint8)
        dequantise.unpack(packed, torch.empty(64, 4096, dtype=target), form=form, group=group)
    # Each pair of form, rows, outputs and dtype once at least.
    for (wire, rows), outputs in itertools.product(
        itertools.product((None, "int8", "int10", "int4"), (1, 16)), (256, 40960)
    ):
        dtype = DTYPES[(wire in {"int8", "int4"}) ^ (rows > 1) ^ (outputs > 256)]
        bias = torch.empty(outputs, dtype=dtype) if outputs > 256 else None
        columns = row_bytes(wire, 4096, 32) if wire else 4096
        weight = torch.empty(outputs, columns, dtype=torch.uint8 if wire else dtype)
        x, out = torch.empty(rows, 4096, dtype=dtype), torch.empty(rows, outputs, dtype=dtype)
        product.linear(x, weight, bias, out, form=wire, group=32)


def compile_for_target(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stand in for ``JITFunction.run``: compile for the target where the original would launch."""
    bound = kernel.signature.bind(*args, **kwargs)
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = bound.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        number = "fp32" if isinstance(value, float) else "i32"
        signature[parameter.name] = _POINTERS[value.dtype] if is_tensor else number
        # As a launch would: addresses and numbers that 16 divides are known as such.
        if number == "i32" and (value.data_ptr() if is_tensor else value) % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=TARGET, options={}
    )
    if len(sys.argv) > 1:
        with open(f"{sys.argv[1]}/{kernel.__name__}-{compiled.hash[:8]}.cubin", "wb") as file:
            file.write(compiled.asm["cubin"])
    form = {name: str(value) for name, value in {**signature, **constants}.items()}
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "form": form,
                "shared_bytes": compiled.metadata.shared,
                "ptx": compiled.asm["ptx"],
            }
        )
    )


if __name__ == "__main__":
    main()
