"""Kernel sources for a GPU by Inductor, in Triton: what is compiled later, for a GPU that need not be here.

Of the block sizes that Inductor would try out the first are taken, so that equal segments are equal kernels
and nothing is measured. Shapes are part of the source: a launch takes addresses and nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from gascompile.codegen.cpp import (
    KernelMemory,
    LaunchRecorder,
    inductor_module,
    known_layout,
    recorded_kernel,
    taken_apart,
)
from gascompile.codegen.target import GpuTarget, seen_by_inductor
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.kernels import Kernel, Launch
from gascompile.passes.graph.segments import lies_anywhere
from gascompile.runtime.kernels.fused import one_by_one

_OPTIONS = {
    "alignment_asserts": False,
    "assert_indirect_indexing": False,
    "combo_kernels": False,
    "compile_threads": 1,  # else other processes compile what is written here, too
    "coordinate_descent_tuning": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "triton.autotune_at_compile_time": False,
    "triton.autotune_pointwise": False,
    "triton.cooperative_reductions": False,  # blocks that wait for each other need another launch
    "triton.cudagraphs": False,
    "triton.enable_pdl": False,
    "triton.mix_order_reduction": False,
    "triton.use_tensor_descriptor": False,
}
_HEADER = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonSource:
    """A kernel in Triton with all that its compilation needs."""

    symbol: str
    text: str
    """A Python module with the function of that name."""
    signature: Mapping[str, str]
    """Triton's type of each argument: ``*fp32``, or ``constexpr``."""
    constants: Mapping[str, int]
    """Sizes and block sizes."""
    aligned: tuple[str, ...]
    """Arguments that are multiples of ``ALIGNMENT_BYTES``."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTriton:
    """A kernel and the sources of the functions it launches."""

    kernel: Kernel
    sources: tuple[TritonSource, ...]


def generate_triton(
    key: str,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    *,
    target: GpuTarget,
) -> GeneratedTriton:
    """Return the kernel that computes ``outputs`` from ``inputs`` by ``nodes``; ``key`` makes its symbols unique.

    Raises:
        UnsupportedOpError: Inductor would call something else than compiled loops, or lay a result out otherwise.
    """
    read, made = [known_layout(n) for n in inputs], [known_layout(n) for n in outputs]
    with seen_by_inductor(target):
        module = inductor_module(
            one_by_one(nodes, inputs, outputs),
            read,
            made,
            options=_known_options(),
            device="cuda",
            anywhere=[place for place, node in enumerate(inputs) if lies_anywhere(node)],
        )
        makers, call = taken_apart(module, "triton")
        functions = {name: _function(maker.args[1]) for name, maker in makers.items()}
    recorder = LaunchRecorder(len(inputs))
    writer = _Writer(key, recorder)
    names: dict[str, object] = {
        "torch": _Torch(),
        "get_raw_stream": lambda _index: None,
        "empty_strided_cuda": recorder.allocate,
    }
    names |= {name: _Launcher(writer, function) for name, function in functions.items()}
    returned = recorder.run(call, names, [KernelMemory(i, 0, of) for i, of in enumerate(read)])
    kernel = recorded_kernel(recorder, read, made, returned)
    return GeneratedTriton(
        kernel=replace(kernel, aligned=_aligned_inputs(kernel, writer.sources)),
        sources=tuple(writer.sources.values()),
    )


def _known_options() -> dict[str, object]:
    """Return the options that this version of Inductor has."""
    from torch._inductor import config

    options: dict[str, object] = {}
    for name, value in _OPTIONS.items():
        *outer, last = name.split(".")
        if hasattr(getattr(config, outer[0]) if outer else config, last):
            options[name] = value
    return options


def _aligned_inputs(kernel: Kernel, sources: Mapping[str, TritonSource]) -> tuple[int, ...]:
    places = set()
    for launch in kernel.launches:
        source = sources[launch.symbol]
        pointers = [name for name, of in source.signature.items() if of != "constexpr"]
        for name, pointer in zip(pointers, launch.arguments, strict=True):
            if name in source.aligned and pointer.place < len(kernel.inputs):
                places.add(pointer.place)
    return tuple(sorted(places))


# ------------------------------------------------------------ what Inductor wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """A kernel of the generated module."""

    text: str
    """The module of this kernel; its function is called ``name``."""
    name: str
    arguments: tuple[str, ...]
    """All that a call takes, and the constants that its configuration gives after them."""
    types: Mapping[str, str]
    aligned: tuple[str, ...]
    constants: Mapping[str, int]
    num_warps: int
    num_stages: int
    grid: Callable[[Mapping[str, int]], tuple[int, ...]]


def _function(module: ast.expr) -> _Function:
    """Read the module of one kernel: its decorator says the types and how it may be launched."""
    defined = [
        n for n in ast.parse(ast.literal_eval(module)).body if isinstance(n, ast.FunctionDef)
    ]
    function = defined[-1]
    settings, chosen = _heuristics(function.decorator_list[0])
    triton_meta, inductor_meta = settings["triton_meta"], settings["inductor_meta"]
    function.decorator_list = function.decorator_list[1:]
    body = "\n\n".join(ast.unparse(node) for node in defined)
    names = [a.arg for a in function.args.args]
    types = {name: triton_meta["signature"].get(name, "constexpr") for name in names}
    attributes = triton_meta["configs"][0]
    given = {name: value for name, value in chosen.kwargs.items() if name in names}
    return _Function(
        text=f"{_HEADER}\n\n{body}\n",
        name=function.name,
        arguments=tuple(name for name in names if name not in given),
        types=types,
        aligned=tuple(
            names[place]
            for (place,), of_place in attributes.items()
            if types[names[place]].startswith("*") and ["tt.divisibility", 16] in of_place
        ),
        constants=given,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        grid=_grid(inductor_meta, chosen),
    )


def _heuristics(decorator: ast.expr) -> tuple[dict[str, Any], Any]:
    """Return the arguments of Inductor's decorator, and the first configuration it would try."""
    from torch._inductor.runtime import hints, triton_heuristics

    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
        raise UnsupportedOpError("its kernel says nothing of how it is launched")
    kind = decorator.func.attr
    names = {**vars(hints), "__file__": "", "settings": dict}
    decorator.func = ast.Name(id="settings", ctx=ast.Load())
    expression = ast.fix_missing_locations(ast.Expression(body=decorator))
    # Inductor wrote it just now, from the ops of the segment.
    settings = eval(compile(expression, "<generated>", "eval"), names)  # noqa: S307
    configurations: list[Any] = []

    def note(size_hints: object, configs: Sequence[Any], *_: object, **__: object) -> None:
        configurations.extend(configs)

    before: Any = triton_heuristics.cached_autotune
    vars(triton_heuristics)["cached_autotune"] = note
    try:
        getattr(triton_heuristics, kind)(**settings)
    finally:
        vars(triton_heuristics)["cached_autotune"] = before
    if not configurations:
        raise UnsupportedOpError(f"Inductor has no configuration for its kernel, a {kind}")
    return settings, configurations[0]


def _grid(
    inductor_meta: Mapping[str, Any], chosen: Any
) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    expression = GridExpr.from_meta(dict(inductor_meta), chosen)
    return lambda sizes: tuple(int(n) for n in expression.eval_slow(dict(sizes)))


# ------------------------------------------------------------ what its calls become


@dataclass(slots=True)
class _Writer:
    """Makes a source of each kernel with the sizes of its launches."""

    key: str
    recorder: LaunchRecorder
    sources: dict[str, TritonSource] = field(default_factory=dict)
    _symbols: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)

    def launch(self, function: _Function, values: Sequence[object]) -> None:
        if len(values) != len(function.arguments):
            raise UnsupportedOpError(f"its kernel takes {len(function.arguments)} arguments")
        pointers, sizes = [], {}
        for name, value in zip(function.arguments, values, strict=True):
            if isinstance(value, KernelMemory) and function.types[name].startswith("*"):
                pointers.append(value.pointer)
            elif isinstance(value, int):
                sizes[name] = value
            else:
                raise UnsupportedOpError("its kernel takes other arguments than tensors and sizes")
        grid = function.grid(sizes)
        if 0 in grid:
            return
        same = (function.text, tuple(sizes.values()))
        symbol = self._symbols.setdefault(same, f"gas_{self.key}_{len(self._symbols)}")
        if symbol not in self.sources:
            self.sources[symbol] = _source(function, symbol, sizes)
        self.recorder.launches.append(Launch(symbol=symbol, arguments=tuple(pointers), grid=grid))


def _source(function: _Function, symbol: str, sizes: Mapping[str, int]) -> TritonSource:
    constants = {**sizes, **function.constants}
    return TritonSource(
        symbol=symbol,
        text=function.text.replace(f"def {function.name}(", f"def {symbol}(", 1),
        signature={n: "constexpr" if n in constants else of for n, of in function.types.items()},
        constants=constants,
        aligned=function.aligned,
        num_warps=function.num_warps,
        num_stages=function.num_stages,
    )


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Stands for a compiled kernel while its calls are noted."""

    writer: _Writer
    function: _Function

    def run(self, *values: object, stream: object) -> None:
        del stream
        self.writer.launch(self.function, values)


class _Torch:
    """What generated code uses of torch: types, and the choice of a device."""

    class cuda:  # noqa: N801 - torch's name
        _DeviceGuard = nullcontext

        @staticmethod
        def set_device(_index: int) -> None: ...

    def __getattr__(self, name: str) -> torch.dtype:
        dtype: object = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedOpError(f"it calls torch.{name}")
        return dtype
