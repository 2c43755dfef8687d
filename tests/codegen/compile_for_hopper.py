"""Writes and compiles kernels for a GPU that is not here, in a process whose Triton is not the interpreter.

Run as a script; prints a JSON object per function.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from gascompile.codegen.cubin import compile_image, joined
from gascompile.codegen.target import GpuTarget
from gascompile.codegen.triton import generate_triton
from tests.codegen.test_triton import chain, norms, parts, rms_norm, traced


def main() -> None:
    """Compile segments of several kinds."""
    major, minor = (int(n) for n in sys.argv[1].split("."))
    target = GpuTarget(major=major, minor=minor, multi_processor_count=132)
    wide = torch.zeros(16, 4096, dtype=torch.bfloat16)
    segments: dict[str, tuple[Any, ...]] = {
        "chain": (chain, wide, wide),
        "rms": (rms_norm, wide, wide[0]),
        "norms": (norms, torch.zeros(2, 5000), torch.zeros(5000)),
        "whole": (lambda x: (x * 2).sum() + 1, torch.zeros(3000, 401)),
    }
    for name, (function, *inputs) in segments.items():
        nodes = traced(function, *inputs)
        given, ops, made = parts(nodes)
        found = generate_triton(name, ops, given, made, target=target)
        images = {s.symbol: compile_image(s, target) for s in found.sources}
        code, functions = joined(images)
        for source in found.sources:
            of = functions[source.symbol]
            image = code[of.start : of.stop]
            own = sum(kind != "constexpr" for kind in source.signature.values())
            launches = [x for x in found.kernel.launches if x.symbol == source.symbol]
            print(
                json.dumps(
                    {
                        "segment": name,
                        "magic": image[:4].decode("latin1"),
                        # Bits 8 to 15 of an ELF's flags say for which capability it is.
                        "flags": int.from_bytes(image[48:52], "little"),
                        "has_symbol": source.symbol.encode() in image,
                        "threads": of.threads,
                        "warps": source.num_warps,
                        "shared_bytes": of.shared_bytes,
                        "extra_parameters": of.num_parameters - own,
                        "arguments": [len(x.arguments) for x in launches],
                        "own": own,
                        "grids": [list(x.grid) for x in launches],
                        "loops": bool(re.search(r"\bfor\b", source.text)),
                    }
                )
            )
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_bytes(code)


if __name__ == "__main__":
    main()
