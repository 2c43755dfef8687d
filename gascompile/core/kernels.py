"""Fused ops as data: which ops of a plan run as one compiled kernel, and how a kernel is called.

A ``Segment`` says where in an inserted graph, a ``Kernel`` what to hand to machine code. The code itself
lies beside them in ``KernelFiles``, whose digest covers both, so that a call and its code belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

ALIGNMENT_BYTES = 16
"""Memory is read in such pieces on a GPU, where it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive ops of an inserted graph that one kernel computes. All names are names of its nodes."""

    ops: tuple[str, ...]
    """The nodes that the kernel stands for, views among them, in the graph's order."""
    inputs: tuple[str, ...]
    """Nodes whose tensors the kernel reads, in the order of its arguments."""
    outputs: tuple[str, ...]
    """Nodes among ``ops`` whose tensors the kernel makes."""
    views_before: tuple[str, ...] = ()
    """Views among ``ops`` of what was there before: taken one by one before the kernel."""
    views_after: tuple[str, ...] = ()
    """Views among ``ops`` of what the kernel makes: taken one by one after it."""
    scratch_limit_bytes: int
    """What the kernel may allocate beside its outputs within what the plan reserves."""
    key: str
    """Digest of structure, constants and layouts: equal segments have equal keys, and one kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A strided tensor, without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """An argument of a launch: an address in an input or a buffer."""

    place: int
    """Number of the input; buffers are counted on from there."""
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call of a function of the library."""

    symbol: str
    arguments: tuple[Pointer, ...]
    grid: tuple[int, ...] = ()
    """Blocks in each direction, on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """How to compute a segment: check the inputs, allocate outputs and scratch, make the launches."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    """The first buffers."""
    scratch_bytes: tuple[int, ...] = ()
    """Sizes of the other buffers, which are free again when the last launch is done."""
    launches: tuple[Launch, ...]
    aligned: tuple[int, ...] = ()
    """Inputs whose addresses the machine code takes for multiples of ``ALIGNMENT_BYTES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFunction:
    """A function in the machine code for a GPU: where its image lies, and what a launch gives each block."""

    start: int
    """Its image is the bytes of the code from here to ``stop``."""
    stop: int
    threads: int
    shared_bytes: int
    num_parameters: int
    """Addresses that it takes; those behind the arguments of a launch are of memory it does not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLibrary:
    """The calls that machine code was made for: one shared library, or images for a GPU one after the other."""

    FORMAT: ClassVar[str] = "gascompile.kernels/1"

    built_for: Mapping[str, str]
    """What the machine code depends on: torch's version, the processor's features or the GPU's capability."""
    kernels: Mapping[str, Kernel]
    """By the keys of segments."""
    functions: Mapping[str, GpuFunction] = field(default_factory=dict)
    """Of a GPU, by symbol; a shared library names its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """What of a plan runs fused, or why nothing does."""

    FORMAT: ClassVar[str] = "gascompile.fusion/1"

    segments: tuple[Segment, ...] = ()
    gain_s: float = 0.0
    """By how much the replay of the plan is shorter with the segments' predicted seconds; per run."""
    compile_s: float = 0.0
    """What making the kernels took; 0 where all of them were there."""
    reason: str = ""
    """Why nothing is fused; empty where something is."""
    lacks_compiler: bool = False
    """More would be fused, but there was no compiler: a plan that is kept is made again where there is one."""
    onednn: bool = field(default=False, metadata={"left_out": True})
    """Large products in ``float32`` are oneDNN's where that is the faster library and the plan has memory for them."""


@dataclass(frozen=True)
class KernelFiles:
    """A ``KernelLibrary`` as JSON and its machine code: what is stored, and trusted or not, as one."""

    record: bytes
    code: bytes

    @cached_property
    def digest(self) -> str:
        """BLAKE2b of the lengths and the bytes of both."""
        state = hashlib.blake2b(digest_size=20)
        for part in (self.record, self.code):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedReport:
    """How much of a compiled model runs fused in this process."""

    num_segments: int
    num_ops: int
    """Ops that run inside segments, of ``num_all_ops``."""
    num_all_ops: int
    num_kernels: int
    """Different kernels among the segments."""
    gain_s: float
    """Predicted seconds saved per run."""
    compile_s: float
    """What compiling took in this process."""
    reason: str
    """Why nothing is fused; empty where something is."""
