"""Compiles Triton sources to machine code of an NVIDIA GPU, which need not be here; no part of it needs the driver.

What comes out is one file: the images one after the other. Where each lies and what a launch of it takes
is data beside it, so that running it needs neither Triton nor Inductor.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gascompile.codegen.build import KernelBuildError, NoCompilerError
from gascompile.codegen.target import GpuTarget
from gascompile.codegen.triton import TritonSource
from gascompile.core.kernels import ALIGNMENT_BYTES, GpuFunction

_CODE_VERSION = "1"
"""Raised where sources or launches change in meaning, so that older kernels are not taken for today's."""
_MAX_SHARED_BYTES = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448}
"""What one block may have, by capability; from NVIDIA's programming guide."""
_LEAST_SHARED_BYTES = 101376  # 99 KiB, of capabilities 8.6 and 8.9 and unknown ones


class NoTritonError(NoCompilerError):
    """Triton cannot compile for an NVIDIA GPU here."""

    def __init__(self, reason: str) -> None:
        KernelBuildError.__init__(self, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The machine code of one function."""

    cubin: bytes
    threads: int
    shared_bytes: int
    num_parameters: int


def missing_triton() -> str:
    """Return why nothing can be compiled for a GPU here; empty where it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'gascompile[gpu]'"
    if os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}:
        return "TRITON_INTERPRET is set, so Triton compiles nothing; unset it"
    return ""


def triton_version() -> str:
    """Return the version of the installed Triton, without importing it; empty where there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def built_for_gpu(target: GpuTarget) -> dict[str, str]:
    """Return what kernels that are compiled here for ``target`` depend on, the compiler's versions included."""
    return {
        **runs_on_gpu(target),
        "torch": str(torch.__version__),
        "triton": triton_version(),
        "processors": str(target.multi_processor_count),
    }


def runs_on_gpu(target: GpuTarget) -> dict[str, str]:
    """Return what machine code must have been made for to run on ``target``, whatever made it."""
    return {"code": _CODE_VERSION, "backend": "cuda", "capability": target.capability}


def joined(images: Mapping[str, Image]) -> tuple[bytes, dict[str, GpuFunction]]:
    """Return the machine code of all images, and where in it each function lies."""
    parts: list[bytes] = []
    functions: dict[str, GpuFunction] = {}
    start = 0
    for symbol, image in images.items():
        functions[symbol] = GpuFunction(
            start=start,
            stop=start + len(image.cubin),
            threads=image.threads,
            shared_bytes=image.shared_bytes,
            num_parameters=image.num_parameters,
        )
        parts.append(image.cubin)
        start += len(image.cubin)
    return b"".join(parts), functions


def compile_image(source: TritonSource, target: GpuTarget) -> Image:
    """Return the machine code of one Triton source.

    Raises:
        NoTritonError: Triton is not there, or interprets.
        KernelBuildError: it failed, or the kernel needs what a launch does not give.
    """
    if reason := missing_triton():
        raise NoTritonError(reason)
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompilationError
    from triton.runtime.errors import PTXASError

    if "nvidia" not in backends:
        raise NoTritonError("this build of Triton has no backend for NVIDIA GPUs; install another")
    function = jit_function(source)
    attributes = {
        (place,): [["tt.divisibility", ALIGNMENT_BYTES]]
        for place, name in enumerate(function.arg_names)
        if name in source.aligned
    }
    try:
        compiled = triton.compile(
            ASTSource(function, dict(source.signature), dict(source.constants), attributes),
            target=GPUTarget("cuda", target.major * 10 + target.minor, target.warp_size),
            options={
                "num_warps": source.num_warps,
                "num_stages": source.num_stages,
                "enable_fp_fusion": False,  # a product is rounded before it is added, as op by op
            },
        )
    except (CompilationError, PTXASError, RuntimeError, OSError) as error:
        raise KernelBuildError(f"Triton failed on the kernel '{source.symbol}': {error}") from error
    return _image(compiled, source, target)


def jit_function(source: TritonSource) -> Any:
    """Return what Triton makes of the function of ``source``: to be compiled, or interpreted."""
    with tempfile.TemporaryDirectory(prefix="gascompile-kernels-") as folder:
        # Triton reads a function's source from its file, once.
        path = Path(folder) / f"{source.symbol}.py"
        path.write_text(source.text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(source.symbol, path)
        assert spec is not None and spec.loader is not None, "a Python file has a loader"
        module = importlib.util.module_from_spec(spec)
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        try:
            spec.loader.exec_module(module)
        finally:
            sys.dont_write_bytecode = before
    return getattr(module, source.symbol)


def _image(compiled: Any, source: TritonSource, target: GpuTarget) -> Image:
    launch = compiled.metadata
    if launch.name != source.symbol:
        raise KernelBuildError(f"Triton calls the kernel '{source.symbol}' '{launch.name}'")
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(launch, name, 0):
            raise KernelBuildError(
                f"the kernel '{source.symbol}' wants memory of its own, which no launch gives it"
            )
    most = _MAX_SHARED_BYTES.get((target.major, target.minor), _LEAST_SHARED_BYTES)
    if launch.shared > most:
        raise KernelBuildError(
            f"the kernel '{source.symbol}' takes {launch.shared} bytes of shared memory, a block has {most}"
        )
    if getattr(launch, "num_ctas", 1) != 1:
        raise KernelBuildError(f"the kernel '{source.symbol}' is launched in clusters of blocks")
    return Image(
        cubin=compiled.asm["cubin"],
        threads=int(launch.num_warps) * target.warp_size,
        shared_bytes=int(launch.shared),
        num_parameters=_num_parameters(compiled.asm["ptx"], source),
    )


def _num_parameters(ptx: str, source: TritonSource) -> int:
    """Return how many addresses the function takes: Triton adds some of its own to those of the source."""
    entry = re.search(rf"\.entry\s+{source.symbol}\s*\(([^)]*)\)", ptx)
    types = re.findall(r"\.param\s+\.(\w+)", entry.group(1)) if entry is not None else []
    num_own = sum(of != "constexpr" for of in source.signature.values())
    if len(types) < num_own or any(of not in {"u64", "b64"} for of in types):
        raise KernelBuildError(f"the kernel '{source.symbol}' takes other arguments than addresses")
    return len(types)
