"""``load``: a saved bundle becomes a compiled model again, without solver and without capture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gascompile.api.compiled import CompiledModel
from gascompile.api.matching import advice, settings_misfit
from gascompile.api.runner import Runner
from gascompile.api.unit import Unit
from gascompile.bundles.bundle import Bundle, content_stamp, read_bundle
from gascompile.bundles.check import check_bundle, check_weights
from gascompile.bundles.files import Weights, relocate
from gascompile.capture.fingerprint.fingerprint import versions
from gascompile.codegen.fuse import load_kernels
from gascompile.codegen.packed_kernels import use_packed_kernels
from gascompile.core.config import CompileConfig
from gascompile.core.errors import CheckpointError, FormatError, PlanMismatchError, StorageError
from gascompile.core.progress import task
from gascompile.core.sources import FileStamp
from gascompile.machines.admission import admit_saved
from gascompile.machines.emulated import emulated_name
from gascompile.machines.resolve import host_name, this_machine_name
from gascompile.passes.verify.walk import verify
from gascompile.runtime.memory.lasting_accounts import moves_lasting
from gascompile.weights.checkpoint import open_checkpoint


def load(
    folder: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    any_machine: bool = False,
    allow_code: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    graphs: str = "auto",
    on_exceed: str = "error",
) -> CompiledModel:
    """Open a bundle written by ``CompiledModel.save``: data, which is checked to be what it says before it is used.

    Args:
        folder: the bundle.
        checkpoint: where the weight files are now, if they were moved; their content must be the same.
        any_machine: accept a plan made on another machine. It keeps its budget here too; its speed is
            whatever this machine gives.
        allow_code: run code that is no data: the bundle's compiled kernels, unless they were compiled here, and ops
            beside torch's that this process has registered. Say so only if you trust who made the bundle. Without
            it fused ops run one by one, with a warning that says what that costs.
        cache_dir: where compiled kernels are kept and activations that move to a drive are written.
        graphs: as in ``compile``.
        on_exceed: ``"error"`` stops a run before it takes more than the budget; ``"warn"`` says so afterwards.

    Where reads take another path here than the plan was made for, its predictions are made anew and it warns.

    Raises:
        DeviceError: the plan computes on a GPU that cannot be used here, or whose memory others hold.
        FormatError: the bundle is damaged or of another version of the format.
        PlanMismatchError: it was made by another version of torch or GASCompile, on another machine, or under another
            autocast or default dtype; or its plan is not one of its program.
        CheckpointError: a weight is not the one that its program needs.
        PlanVerificationError: the plan breaks a budget or a dependency.
        StorageError: a weight file is missing or its content has changed.
    """
    path = Path(folder)
    config = CompileConfig.of(cache_dir, graphs=graphs, on_exceed=on_exceed)
    cache = config.cache_dir
    bundle = read_bundle(path, allow_code=allow_code)
    if bundle.step is not None:
        raise FormatError(
            f"{path} holds a training step, which is made of a model and its optimizer; call compile_step"
        )
    _check_versions(bundle.versions, path)
    name = bundle.plan.machine.name
    here = this_machine_name()
    if not any_machine and name not in {here, emulated_name(host_name())}:
        raise PlanMismatchError(
            f"the plan in {path} was made for the machine '{name}', this is '{here}'; compile again "
            "here, or pass any_machine=True to run it as it is"
        )
    verify(bundle.plan)
    if (unfit := settings_misfit(bundle.plan)) is not None:
        raise PlanMismatchError(f"{path}: {unfit.reason}. {advice(unfit)}")
    check_bundle(bundle, cache)
    bundle = replace(bundle, plan=admit_saved(bundle.plan))
    weights = bundle.weights
    if checkpoint is not None:
        weights = _moved(weights, Path(checkpoint))
    bundle = _checked(bundle, weights)
    check_weights(bundle.plan, bundle.program, weights.sources, bundle.weights.stamps, bundle.held)
    if moves_lasting(bundle.plan):
        # What reads files keeps a hand on their memory.
        bundle = replace(bundle, held={name: value.clone() for name, value in bundle.held.items()})
    unit = Unit.of(bundle, graphs=config.graphs)
    use_packed_kernels(bundle.program.forms, cache, make=False)
    if bundle.fusion is not None:
        unit.fusion = load_kernels(bundle, cache_dir=cache, trust=allow_code)
    runner = Runner(
        positional=bundle.positional, units=[unit], cache_dir=cache, on_exceed=config.on_exceed
    )
    return CompiledModel.of(runner)


def _check_versions(saved: Mapping[str, str], path: Path) -> None:
    for name, here in versions().items():
        if saved.get(name) != here:
            raise PlanMismatchError(
                f"the bundle {path} was made with {name} {saved.get(name)}, this is {name} {here}; "
                "compile the model again"
            )


def _moved(weights: Weights, root: Path) -> Weights:
    """Point the weights at files of the same names under ``root``."""
    here = {Path(stamp.path).name: stamp for stamp in open_checkpoint(root).stamps}

    places = {}
    for stamp in weights.stamps:
        stamp_here = here.get(Path(stamp.path).name)
        if stamp_here is None:
            raise CheckpointError(
                f"{root} holds no file '{Path(stamp.path).name}', which the bundle needs"
            )
        places[stamp.path] = stamp_here.path
    return relocate(weights, places)


def _checked(bundle: Bundle, weights: Weights) -> Bundle:
    """Return the bundle with stamps of today; a touched file is accepted if its content is the same."""
    stamps = tuple(_checked_stamp(stamp) for stamp in weights.stamps)
    return replace(bundle, weights=Weights(sources=weights.sources, stamps=stamps))


def _checked_stamp(stamp: FileStamp) -> FileStamp:
    try:
        stat = os.stat(stamp.path)
    except OSError as error:
        raise StorageError(
            f"the weight file {stamp.path} cannot be opened ({error.strerror}); put it back, or pass checkpoint= "
            "with its new place"
        ) from error
    if stat.st_size == stamp.size_bytes and stat.st_mtime_ns == stamp.mtime_ns:
        return stamp
    now = replace(stamp, size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)
    if stat.st_size == stamp.size_bytes and stamp.digest.startswith("content:"):
        with task(f"Checking {Path(stamp.path).name}", stat.st_size) as advance:
            if content_stamp(now, advance).digest == stamp.digest:
                return now
    raise StorageError(
        f"the weight file {stamp.path} is not the one the plan was made for: it had {stamp.size_bytes} bytes, now "
        f"{stat.st_size}, and its content differs; restore it or compile the model again"
    )
