"""Fusion: whether and which segments of a plan run as compiled kernels, and what it takes to load them.

``fuse`` decides once per plan, after planning: kernels that are there are used, others are compiled where
the seconds that a run is predicted to save, times the runs that they may take to pay, exceed the seconds of
the compilation. ``load_kernels`` turns what a bundle holds into calls, if its machine code is trusted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from gascompile.bundles.bundle import Bundle
from gascompile.capture.torch_settings import has_autocast
from gascompile.codegen import store as kernel_store
from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError, UnsupportedOpError
from gascompile.core.kernels import FusedReport, Fusion, Kernel, KernelFiles, KernelLibrary, Segment
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.progress import task
from gascompile.core.sizes import format_time
from gascompile.core.steps import Recompute
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.runtime.kernels import onednn
from gascompile.runtime.kernels.fused import FusedSegment

if TYPE_CHECKING:
    from gascompile.api.unit import Unit
    from gascompile.codegen.backends import KernelBackend
    from gascompile.core.config import CompileConfig

_log = logging.getLogger("gascompile")
_FASTER_LINKS = 1.1
"""Of what was measured: where transfers take hardly longer than the ops, either may decide on the day.

[Empirical] 128 tokens of a 1.1B Llama in 1.5 GiB, whose reads were measured to take 1.16 s and whose ops 1.09 s, took
1.25 s, of which they waited 0.02 s; fused 1.21 s."""


def fuse(
    bundle: Bundle,
    graph_module: fx.GraphModule,
    *,
    cache_dir: Path,
    runs: float,
    exact: bool = False,
) -> Bundle:
    """Return ``bundle`` with its fusion and the kernels for it; nothing fused is a result, too, with a reason.

    Args:
        bundle: a planned program, just captured.
        graph_module: the program with the plan's moves.
        cache_dir: where kernels are kept.
        runs: how many runs a compilation may take to pay; infinity compiles whatever saves anything.
        exact: leave ops by themselves whose results a kernel may round otherwise.
    """
    from gascompile.codegen.backends import backend_of
    from gascompile.codegen.build import KernelBuildError, NoCompilerError

    plan = bundle.plan
    if any(op.site != plan.machine.compute_tier for op in plan.ops):
        return _unfused(bundle, "ops run on several processors, each by itself")
    backend, reason = backend_of(plan.machine)
    if backend is None:
        return _unfused(bundle, reason)
    call_s = backend.call_s
    segments = _worthwhile(graph_module, plan, call_s, exact=exact)
    if not segments:
        return _unfused(bundle, "no consecutive ops gain from being one kernel")
    libraries = _kept_libraries({s.key for s in segments}, backend.built_for(), cache_dir)
    known = _kernels(libraries)
    missing = {s.key: s for s in segments if s.key not in known}
    machine = plan.machine.with_bandwidths(_FASTER_LINKS)
    gain_s = _gain_s(segments, graph_module, plan, call_s, machine)
    cost_s = backend.compile_base_s + backend.compile_each_s * len(missing)
    made: KernelFiles | None = None
    start_s = time.perf_counter()
    reason, lacks_compiler = "", False
    if missing and (math.isinf(runs) or gain_s * runs >= cost_s):
        try:
            made, reason = _compiled(missing, graph_module, backend, cache_dir)
        except KernelBuildError as error:
            _log.warning("ops are not fused: %s", error)
            reason, lacks_compiler = str(error), isinstance(error, NoCompilerError)
    elif missing:
        reason = (
            f"fusing would save {gain_s * 1e6:.0f} us of a run and take about {cost_s:.0f} s to compile, "
            f"which {runs:.0f} runs do not pay; raise fuse_runs"
        )
    compile_s = time.perf_counter() - start_s if made is not None else 0.0
    if made is not None:
        libraries[made.digest] = made
    kernels = _kernels(libraries)
    kept = tuple(s for s in segments if s.key in kernels and _fits(kernels[s.key][1], s))
    if not kept:
        reason = reason or "no kernel fits into the memory of its ops"
        return _unfused(bundle, reason, lacks_compiler=lacks_compiler)
    fusion = Fusion(
        segments=kept,
        gain_s=_gain_s(kept, graph_module, plan, call_s, plan.machine),
        compile_s=compile_s,
        lacks_compiler=lacks_compiler,
    )
    used = {kernels[s.key][0] for s in kept}
    return replace(bundle, fusion=fusion, kernels={d: libraries[d] for d in sorted(used)})


def _unfused(bundle: Bundle, reason: str, *, lacks_compiler: bool = False) -> Bundle:
    return replace(bundle, fusion=Fusion(reason=reason, lacks_compiler=lacks_compiler), kernels={})


def fused_unit(unit: Unit, config: CompileConfig) -> Unit:
    """Decide which ops of a new plan run as compiled kernels, and compile them."""
    if config.fuse == "off" or has_autocast():
        return unit
    unit.bundle = fuse(
        unit.bundle,
        unit.graph_module,
        cache_dir=config.cache_dir,
        runs=config.fuse_runs,
        exact=config.fuse == "exact",
    )
    fusion = unit.bundle.fusion
    if fusion is not None and has_other_products(config, unit.bundle.plan.machine):
        fusion = replace(fusion, onednn=True)
        unit.bundle = replace(unit.bundle, fusion=fusion)
    return with_kernels(unit, config, compile_s=fusion.compile_s if fusion is not None else 0.0)


def has_other_products(config: CompileConfig, machine: Machine) -> bool:
    """Return whether large products are oneDNN's, in plans that are made now; see ``Fusion.onednn``."""
    may_round = config.fuse == "auto" and config.other_products
    is_host = machine.compute_backend == "cpu"
    return may_round and is_host and not has_autocast() and onednn.is_faster_here()


def with_kernels(unit: Unit, config: CompileConfig, compile_s: float = 0.0) -> Unit:
    """Load the compiled kernels that a plan runs with."""
    if unit.bundle.program.forms:
        from gascompile.codegen.packed_kernels import use_packed_kernels

        use_packed_kernels(unit.bundle.program.forms, config.cache_dir, make=True)
    if unit.bundle.fusion is not None:
        unit.fusion = load_kernels(unit.bundle, cache_dir=config.cache_dir, compile_s=compile_s)
    return unit


def outdated(bundle: Bundle, *, cache_dir: Path) -> str:
    """Return why ops of a kept plan should be fused again; empty where they are as they would be today."""
    fusion = bundle.fusion
    if fusion is None:
        return ""
    if fusion.lacks_compiler:
        from gascompile.codegen.backends import has_compiler_for

        if has_compiler_for(bundle.plan.machine):
            return "there was no compiler of kernels when it was made"
    return _refusal(bundle, cache_dir, trust=False) if fusion.segments else ""


# ------------------------------------------------------------ what to fuse


def _worthwhile(
    graph_module: fx.GraphModule, plan: Plan, call_s: float, *, exact: bool
) -> list[Segment]:
    """Return the segments that are predicted to take less time than their ops."""
    from gascompile.passes.graph.segments import segments

    times_s = {op.name: op.time_s for op in plan.ops}
    nodes = {node.name: node for node in graph_module.graph.nodes}
    return [
        segment
        for segment in segments(graph_module, plan, exact=exact)
        if call_s + _segment_s(segment, nodes, plan) < sum(times_s[name] for name in segment.ops)
    ]


def _segment_s(segment: Segment, nodes: Mapping[str, fx.Node], plan: Plan) -> float:
    """Return the predicted seconds of a kernel: its inputs are read once, its outputs written once."""
    from gascompile.cost_models.formulas.op_time import op_time_s

    read_bytes, write_bytes = (
        sum(_size_bytes(nodes[name]) for name in names)
        for names in (segment.inputs, segment.outputs)
    )
    return op_time_s(
        flops=0,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        dtype="float32",
        device=plan.machine.compute_tier,
        machine=plan.machine,
    )


def _size_bytes(node: fx.Node) -> int:
    from gascompile.passes.graph.segments import layout

    of = layout(node)
    value = node.meta["val"]
    return 0 if of is None else math.prod(of.shape) * int(value.element_size())


def _gain_s(
    segments: Sequence[Segment],
    graph_module: fx.GraphModule,
    plan: Plan,
    call_s: float,
    machine: Machine,
) -> float:
    """Return by how much an iteration on ``machine`` is shorter with ``segments`` fused, waits included."""
    nodes = {node.name: node for node in graph_module.graph.nodes}
    times_s: dict[str, float] = {}
    for segment in segments:
        times_s.update(dict.fromkeys(segment.ops, 0.0))
        times_s[segment.ops[-1]] = call_s + _segment_s(segment, nodes, plan)
    ops = tuple(replace(op, time_s=times_s.get(op.name, op.time_s)) for op in plan.ops)
    faster_s = replay_plan(replace(plan, ops=ops), machine).seconds
    # An op that runs again does so by itself, and takes what it took.
    again = [step.source for step in plan.steps if isinstance(step, Recompute)]
    faster_s += sum(max(plan.ops[i].time_s - ops[i].time_s, 0.0) for i in again)
    return max(replay_plan(plan, machine).seconds - faster_s, 0.0)


def _fits(kernel: Kernel, segment: Segment) -> bool:
    return sum(kernel.scratch_bytes) <= segment.scratch_limit_bytes


# ------------------------------------------------------------ kernels


def _compiled(
    missing: Mapping[str, Segment],
    graph_module: fx.GraphModule,
    backend: KernelBackend,
    cache_dir: Path,
) -> tuple[KernelFiles | None, str]:
    """Return the library of the missing kernels; or none, and why.

    Raises:
        KernelBuildError: the compiler is missing or failed.
    """
    backend.require_compiler()
    writer = backend.writer()
    nodes = {node.name: node for node in graph_module.graph.nodes}
    kernels: dict[str, Kernel] = {}
    reason = ""
    with task(f"Fusing ops into {len(missing)} kernels"):
        for key, segment in missing.items():
            parts = (segment.ops, segment.inputs, segment.outputs)
            try:
                kernel = writer.write(key, *([nodes[name] for name in names] for names in parts))
            except UnsupportedOpError as error:
                reason = f"ops '{segment.ops[0]}' to '{segment.ops[-1]}' stay apart: {error}"
                _log.info("%s", reason)
                continue
            if _fits(kernel, segment):
                kernels[key] = kernel
                writer.keep()
        if not kernels:
            return None, reason
        code, functions = writer.build()
    library = KernelLibrary(built_for=backend.built_for(), kernels=kernels, functions=functions)
    files = KernelFiles(record=serial.dumps(library).encode(), code=code)
    try:
        kernel_store.keep(files, cache_dir)
    except StorageError as error:
        _log.warning("ops are not fused, as their kernels cannot be kept: %s", error)
        return None, str(error)
    return files, ""


def _kept_libraries(
    keys: Iterable[str], target: Mapping[str, str], cache_dir: Path
) -> dict[str, KernelFiles]:
    """Return, by their digest, the undamaged libraries of the store that hold kernels of ``keys``."""
    digests = set(kernel_store.find(keys, target, cache_dir).values())
    files_of = {digest: kernel_store.read(digest, cache_dir) for digest in sorted(digests)}
    return {digest: files for digest, files in files_of.items() if files is not None}


def _kernels(libraries: Mapping[str, KernelFiles]) -> dict[str, tuple[str, Kernel]]:
    """Return the kernels of libraries by their key, each with the digest of its library."""
    return {
        key: (digest, kernel)
        for digest, files in libraries.items()
        for key, kernel in kernel_store.read_record(files.record).kernels.items()
    }


# ------------------------------------------------------------ loading


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFusion:
    """The segments of a plan that run fused in this process, and a report on them."""

    segments: tuple[FusedSegment, ...] = ()
    report: FusedReport


def load_kernels(
    bundle: Bundle, *, cache_dir: Path, trust: bool = False, compile_s: float = 0.0
) -> LoadedFusion:
    """Load the machine code of a bundle's kernels; where that is not to be, the ops run one by one.

    Args:
        bundle: what was read or planned; its files' checksums are right.
        cache_dir: where kernels that were compiled here are listed.
        trust: run machine code of unknown origin.
        compile_s: what compiling took just now, for the report.

    Raises:
        FormatError: a record of kernels is damaged.
        StorageError: trusted code cannot be loaded.
        DeviceError: the GPU's driver does not start.
    """
    fusion = bundle.fusion
    if fusion is None:
        return LoadedFusion(report=_report(bundle, (), compile_s, "fusing is off"))
    reason = fusion.reason or _refusal(bundle, cache_dir, trust=trust)
    if reason:
        if not fusion.reason:
            unfused_s = bundle.plan.certificate.predicted_s
            _log.warning(
                "the plan's fused ops run one by one: %s. A run is predicted to take %s in place of %s",
                reason,
                format_time(unfused_s),
                format_time(max(unfused_s - fusion.gain_s, 0.0)),
            )
        return LoadedFusion(report=_report(bundle, (), compile_s, reason))
    from gascompile.codegen.backends import backend_of

    kernels = _kernels(bundle.kernels)
    backend, _ = backend_of(bundle.plan.machine)
    assert backend is not None, "without one there is a refusal"
    loaded = {
        digest: backend.load(files, kernel_store.read_record(files.record))
        for digest, files in bundle.kernels.items()
    }
    if missing := [s for s in fusion.segments if s.key not in kernels]:
        raise FormatError(
            f"the bundle lacks the kernel of the fused ops '{missing[0].ops[0]}' to '{missing[0].ops[-1]}'; "
            "save it again"
        )
    segments = tuple(
        FusedSegment(segment=s, kernel=kernels[s.key][1], library=loaded[kernels[s.key][0]])
        for s in fusion.segments
        if _fits(kernels[s.key][1], s)
    )
    return LoadedFusion(segments=segments, report=_report(bundle, segments, compile_s, ""))


def _refusal(bundle: Bundle, cache_dir: Path, *, trust: bool) -> str:
    """Return why the machine code of a bundle is not run here; empty where it is."""
    from gascompile.codegen.backends import backend_of

    backend, reason = backend_of(bundle.plan.machine)
    if backend is None:
        return reason
    for files in bundle.kernels.values():
        if reason := backend.unlike(kernel_store.read_record(files.record).built_for):
            return reason
    unknown = [d for d in bundle.kernels if not kernel_store.is_trusted(d, cache_dir)]
    if unknown and not trust:
        return (
            f"its kernels {unknown[0]} are machine code that was not compiled here; compile the model again, "
            "or pass allow_code=True (--allow-code) if you trust who made the bundle"
        )
    return ""


def _report(
    bundle: Bundle, segments: Sequence[FusedSegment], compile_s: float, reason: str
) -> FusedReport:
    return FusedReport(
        num_segments=len(segments),
        num_ops=sum(len(f.segment.ops) for f in segments),
        num_all_ops=len(bundle.plan.ops),
        num_kernels=len({f.segment.key for f in segments}),
        gain_s=bundle.fusion.gain_s if bundle.fusion is not None and segments else 0.0,
        compile_s=compile_s,
        reason=reason,
    )
