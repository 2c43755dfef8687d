"""Kernel sources by Inductor: a segment's ops are traced, lowered and written as C++, and nothing is compiled yet.

Inductor writes a Python module with the source of each kernel and a function that allocates and calls. That
function is run here once on stand-ins that note what it does, so that what is kept is data: allocations
and launches, which the runtime carries out without Inductor. ``fusion_triton`` does the same for GPUs.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from gascompile.codegen.build import HEADER
from gascompile.core.deferral import deferring
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.kernels import Kernel, Launch, Layout, Pointer
from gascompile.passes.graph.segments import layout
from gascompile.runtime.kernels.fused import one_by_one

_OPTIONS = {
    "force_pointwise_cat": True,
    "cpp_wrapper": False,
    "size_asserts": False,
    "emulate_precision_casts": True,  # reduced types are rounded after every op, as they are op by op
}
_MIN_PARALLEL_ELEMENTS = 1 << 17
"""Smaller kernels run on one thread: waking others, and waiting for them where a machine is busy, costs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A kernel and the C++ of the functions it launches."""

    kernel: Kernel
    sources: tuple[str, ...]


def generate(
    key: str, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Generated:
    """Return the kernel that computes ``outputs`` from ``inputs`` by ``nodes``; ``key`` makes its symbols unique.

    Raises:
        UnsupportedOpError: Inductor would call something else than compiled loops, or lay a result out otherwise.
    """
    read, made = [known_layout(n) for n in inputs], [known_layout(n) for n in outputs]
    is_small = all(math.prod(of.shape) < _MIN_PARALLEL_ELEMENTS for of in (*read, *made))
    options = {
        "cpp.vec_isa_ok": True,  # found by the processor's flags; trying each with the compiler takes seconds
        # Not bound to a number of threads: the runtime's may be another.
        "cpp.threads": 1 if is_small else -1,
        "cpp.dynamic_threads": not is_small,
    }
    function = one_by_one(nodes, inputs, outputs)
    makers, call = taken_apart(
        inductor_module(function, read, made, options=options), "cpp_pybinding"
    )
    sources = {name: _loops(maker) for name, maker in makers.items()}
    symbols = {name: f"gas_{key}_{i}" for i, name in enumerate(sources)}
    recorder = LaunchRecorder(len(inputs))
    names: dict[str, Callable[..., object]] = {"empty_strided_cpu": recorder.allocate}
    names |= {name: _launcher(recorder, symbol) for name, symbol in symbols.items()}
    returned = recorder.run(call, names, [KernelMemory(i, 0, of) for i, of in enumerate(read)])
    kernel = recorded_kernel(recorder, read, made, returned)
    renamed = (
        re.sub(r"\bkernel\(", f"{symbols[name]}(", text.replace(HEADER, ""), count=1)
        for name, text in sources.items()
    )
    return Generated(kernel=kernel, sources=tuple(renamed))


def known_layout(node: fx.Node) -> Layout:
    """Return the layout of a tensor that a segment reads or makes."""
    of_node = layout(node)
    assert of_node is not None, "segments reads and makes plain tensors"
    return of_node


@deferring
def inductor_module(
    function: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    *,
    options: Mapping[str, object],
    device: str = "cpu",
    anywhere: Collection[int] = (),
) -> str:
    """Return the source of the Python module that Inductor writes for ``function``.

    Args:
        function: takes the inputs, returns the outputs.
        inputs: what is read.
        outputs: how results have to lie in memory.
        options: of Inductor, beside those of every kernel.
        device: where the tensors are; they are never made, so it need not be there.
        anywhere: which inputs may begin at any element, in place of a round address.

    Raises:
        UnsupportedOpError: it cannot.
    """
    from torch._inductor import config
    from torch._inductor.debug import DebugContext
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    try:
        # Their import walks over all ops, and fails where a library left the kernel of one that is gone.
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.graph import GraphLowering

        with mode, torch.no_grad(), config.patch({**_OPTIONS, **options}):
            fakes = [
                _fake(of, device, offset=int(place in anywhere)) for place, of in enumerate(inputs)
            ]
            traced = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
            _keep_strides(traced.graph, outputs)
        with (
            torch.no_grad(),
            V.set_fake_mode(mode),
            DebugContext(),
            config.patch({**_OPTIONS, **options}),
        ):
            graph = GraphLowering(traced, example_inputs=fakes, shape_env=None)
            with V.set_graph_handler(graph):
                graph.run(*fakes)
                source: str = graph.codegen()[0].value
    except (RuntimeError, AssertionError, TypeError) as error:
        # Lowerings signal what they cannot do in all of these ways.
        raise UnsupportedOpError(f"Inductor has no code for it: {error}") from error
    return source


def _fake(of: Layout, device: str, *, offset: int) -> torch.Tensor:
    """Return a tensor of a layout that begins ``offset`` elements into its memory."""
    dtype: torch.dtype = getattr(torch, of.dtype)
    last = sum((n - 1) * step for n, step in zip(of.shape, of.stride, strict=True))
    memory = torch.empty(last + 1 + offset, dtype=dtype, device=device)
    return memory.as_strided(of.shape, of.stride, offset)


def _keep_strides(graph: fx.Graph, outputs: Sequence[Layout]) -> None:
    """Tell Inductor that the results have to lie in memory as they would op by op."""
    output = graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    output.meta["original_output_strides"] = [of.stride for of in outputs]


def taken_apart(module: str, maker: str) -> tuple[dict[str, ast.Call], ast.FunctionDef]:
    """Return the call of ``maker`` that makes each kernel, by its Python name, and the function that calls them.

    Raises:
        UnsupportedOpError: there are none.
    """
    makers: dict[str, ast.Call] = {}
    calls: list[ast.FunctionDef] = []
    for node in ast.walk(ast.parse(module)):
        match node:
            case ast.FunctionDef(name="call"):
                calls.append(node)
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(attr=attribute), args=[_, ast.Constant(value=str())]
                ) as made,
            ) if attribute == maker:
                makers[name] = made
            case _:
                pass
    if len(calls) != 1 or not makers:
        raise UnsupportedOpError("Inductor made no loops of it")
    return makers, calls[0]


def _loops(made: ast.Call) -> str:
    """Return the C++ of a kernel that takes tensors alone."""
    types, text = made.args
    if not isinstance(types, ast.List) or not all(
        isinstance(t, ast.Constant) and str(t.value)[-1:] == "*" for t in types.elts
    ):
        raise UnsupportedOpError("its kernel takes other arguments than tensors")
    return str(ast.literal_eval(text))


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """Stands for a tensor while the calls are noted: where it lies and what it looks like."""

    place: int
    offset_bytes: int
    layout: Layout

    @property
    def pointer(self) -> Pointer:
        return Pointer(place=self.place, offset_bytes=self.offset_bytes)


class LaunchRecorder:
    """Notes what the generated function allocates and launches."""

    def __init__(self, num_inputs: int) -> None:
        self.num_inputs = num_inputs
        self.buffers: list[Layout] = []
        self.launches: list[Launch] = []

    def run(
        self, call: ast.FunctionDef, names: Mapping[str, object], inputs: list[KernelMemory]
    ) -> list[KernelMemory]:
        """Run the generated function on stand-ins; ``names`` are what it calls.

        Raises:
            UnsupportedOpError: it calls something that is no loop, such as a library.
        """
        call.args.args = [a for a in call.args.args if a.arg != "self"]
        module = ast.Module(body=[call], type_ignores=[])
        known: dict[str, object] = {
            "torch": torch,
            "reinterpret_tensor": self._reinterpret,
            "assert_size_stride": lambda *_: None,
            **names,
        }
        exec(compile(ast.fix_missing_locations(module), "<generated>", "exec"), known)  # noqa: S102
        function: Any = known["call"]
        try:
            returned = list(function(inputs))
        except (NameError, AttributeError, TypeError, RuntimeError) as error:
            raise UnsupportedOpError(f"it calls more than its own loops: {error}") from error
        if not all(isinstance(value, KernelMemory) for value in returned):
            raise UnsupportedOpError("it returns something else than tensors")
        return returned

    def allocate(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> KernelMemory:
        """Note a new buffer."""
        name = str(dtype).removeprefix("torch.")
        self.buffers.append(Layout(dtype=name, shape=tuple(shape), stride=tuple(stride)))
        return KernelMemory(self.num_inputs + len(self.buffers) - 1, 0, self.buffers[-1])

    @staticmethod
    def _reinterpret(
        base: KernelMemory, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> KernelMemory:
        dtype: torch.dtype = getattr(torch, base.layout.dtype)
        seen = Layout(dtype=base.layout.dtype, shape=tuple(shape), stride=tuple(stride))
        return KernelMemory(base.place, base.offset_bytes + offset * dtype.itemsize, seen)


def _launcher(recorder: LaunchRecorder, symbol: str) -> Callable[..., None]:
    def launch(*arguments: KernelMemory) -> None:
        if not all(isinstance(value, KernelMemory) for value in arguments):
            raise UnsupportedOpError("its kernel takes other arguments than tensors")
        pointers = tuple(value.pointer for value in arguments)
        recorder.launches.append(Launch(symbol=symbol, arguments=pointers))

    return launch


def recorded_kernel(
    recorder: LaunchRecorder,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    returned: Sequence[KernelMemory],
) -> Kernel:
    """Return what was noted, with the outputs as the first buffers.

    Raises:
        UnsupportedOpError: a result does not lie in memory of its own, as it would op by op.
    """
    first = recorder.num_inputs
    places = [memory.place for memory in returned]
    if len(set(places)) != len(places) or any(place < first for place in places):
        raise UnsupportedOpError("a result shares its memory with another one or with an input")
    for memory, wanted in zip(returned, outputs, strict=True):
        whole = recorder.buffers[memory.place - first]
        if memory.offset_bytes or _size_bytes(whole) != _size_bytes(wanted):
            raise UnsupportedOpError("a result is part of a larger buffer")
        if _strides_that_count(memory.layout) != _strides_that_count(wanted):
            raise UnsupportedOpError("a result would lie otherwise in memory than op by op")
    others = [p for p in range(first, first + len(recorder.buffers)) if p not in places]
    number = {p: i for i, p in enumerate((*range(first), *places, *others))}
    return Kernel(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        scratch_bytes=tuple(_size_bytes(recorder.buffers[p - first]) for p in others),
        launches=tuple(
            replace(
                launch,
                arguments=tuple(replace(a, place=number[a.place]) for a in launch.arguments),
            )
            for launch in recorder.launches
        ),
    )


def _strides_that_count(of: Layout) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return what two layouts that mean the same bytes share: the stride of a single element is nobody's."""
    strides = tuple(0 if n == 1 else step for n, step in zip(of.shape, of.stride, strict=True))
    return of.dtype, of.shape, strides


def _size_bytes(of: Layout) -> int:
    dtype: torch.dtype = getattr(torch, of.dtype)
    if 0 in of.shape:
        return 0
    last = sum((n - 1) * step for n, step in zip(of.shape, of.stride, strict=True))
    return (last + 1) * dtype.itemsize
