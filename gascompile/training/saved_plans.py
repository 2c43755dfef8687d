"""Saved plans: those of a step's kinds of batches in a folder of the user's, and a step that is made from them.

Each is a bundle with what its capture depended on, as in the cache. What is in a folder may be anybody's work: it is
data, checked as such, and used only for what it was made for. Nothing is captured or planned beside it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from gascompile.bundles.bundle import Bundle, read_bundle, write_bundle
from gascompile.bundles.check import check_workload
from gascompile.bundles.files import BundleFiles, read_bundle_files
from gascompile.bundles.reuse import CachedPlan, read_known, write_known
from gascompile.capture.saved.ops import is_allowed
from gascompile.capture.torch_settings import SETTINGS
from gascompile.core.budget import Budget
from gascompile.core.errors import FormatError, PlanMismatchError, StorageError
from gascompile.core.files import exchange
from gascompile.core.machine import Machine
from gascompile.core.sizes import format_size
from gascompile.machines.emulated import emulated_name
from gascompile.machines.resolve import host_name, this_machine_name
from gascompile.training.planning.step_workload import step_workload
from gascompile.training.step_cache import PlannedStep, bundle_of
from gascompile.training.unit import StepUnit

_REQUIRED = {
    "graph": "code or values behind the model and the loss",
    "inputs": "batch",
    "storages": "memory that tensors of the model share",
    "optimizer": "optimizer",
    "step": "options of compile_step",
    SETTINGS: "settings of torch",
    "process": "threads or kind of processor",
    "versions": "versions of torch or GASCompile",
}
"""What a program rests on. Its machine and its budget a plan has in itself."""
_STEP_OPS = ("gascompile_updates.", "gascompile_dropout.")
_BACKWARD = ("_backward", "_backward_data")
_NORM = "aten._native_batch_norm_legit_functional."


def save_plans(units: Iterable[StepUnit], folder: Path) -> None:
    """Write the plans of units as ``folder``, in the place of such a folder.

    Raises:
        PlanMismatchError: a plan rests on what another process cannot compare.
        StorageError: the folder cannot be written, or holds something else.
    """
    if folder.exists() and not (
        folder.is_dir() and set(folder.iterdir()) == set(_plans_in(folder))
    ):
        raise StorageError(f"{folder} holds something else than plans; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        for unit in units:
            _save(unit, temporary)
        if not (temporary / "plans").is_dir():
            raise PlanMismatchError(
                "nothing has been planned yet; pass example_batch, or call prepare(batch) first"
            )
        retired = temporary / ".before"
        plans = temporary / "plans"
        if not folder.exists() or not exchange(plans, folder):
            if folder.exists():
                os.rename(folder, retired)
            plans.rename(folder)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        if not folder.exists() and (temporary / ".before").exists():
            os.rename(temporary / ".before", folder)
        shutil.rmtree(temporary, ignore_errors=True)


def _save(unit: StepUnit, folder: Path) -> None:
    bundle, why = bundle_of(unit.program, unit.plan, unit.place.printed)
    known = unit.basis.known
    if known is None or why is not None:
        raise PlanMismatchError(
            f"the plan of a {unit.plan.workload.name} cannot be saved: {why or 'what it rests on cannot be compared'}; "
            "the log says why it is captured again each time"
        )
    changes = unit.program.program.states & unit.program.gradients
    kind = "call" if unit.calls else "evaluation"
    if unit.trains:
        kind = "update" if changes else "accumulation"
    number = sum(1 for _ in (folder / "plans").glob(f"{kind}-*")) + 1
    target = folder / "plans" / f"{kind}-{number}"
    write_bundle(replace(bundle, fusion=unit.bundle.fusion, kernels=unit.bundle.kernels), target)
    write_known(target, known)


class SavedPlans:
    """The plans of a folder, which a step is made from."""

    def __init__(self, folder: Path) -> None:
        """Read what each is of.

        Raises:
            FormatError: the folder holds no plans of steps, or one is damaged.
            StorageError: a file cannot be read.
        """
        self._folder = folder
        self._files = [read_bundle_files(path) for path in _plans_in(folder)]
        if not self._files or any(files.step is None for files in self._files):
            raise FormatError(
                f"{folder} holds no plans of a training step; write some with save_plan"
            )

    def machine(self, given: Machine | None) -> Machine:
        """Return what the plans were made for.

        Raises:
            PlanMismatchError: it is neither this machine nor the given one.
        """
        planned_for = self._files[0].plan.machine
        here = {this_machine_name(), emulated_name(host_name())} if given is None else {given.name}
        for files in self._files:
            if (name := files.plan.machine.name) not in here:
                raise PlanMismatchError(
                    f"the plan in {files.folder} was made for the machine '{name}', this is '{min(here)}'; compile "
                    "again here, or pass machine= as it was planned for"
                )
        return planned_for

    def require_budget(self, limits_bytes: Mapping[str, int]) -> None:
        """Refuse another budget than that of the plans.

        Raises:
            PlanMismatchError: names both.
        """
        for files in self._files:
            for tier, planned_bytes in files.plan.budget_bytes.items():
                if limits_bytes.get(tier) != planned_bytes:
                    raise PlanMismatchError(
                        f"the plan in {files.folder} is for {format_size(planned_bytes)} of {tier}, the budget is "
                        f"{format_size(limits_bytes.get(tier, 0))}; leave out budget=, or compile without plan="
                    )

    @property
    def budget(self) -> Budget:
        """Return the budget of the plans."""
        return Budget(self._files[0].plan.budget_bytes)

    def find(self, place: CachedPlan) -> Bundle:
        """Return the plan for a kind of batch, and let ``place`` know what it depends on.

        Raises:
            FormatError: it is damaged, or calls what no step does.
            PlanMismatchError: there is none; names what is different.
        """
        if place.printed.opaque:
            raise PlanMismatchError(
                f"{place.printed.opaque[0]}, which cannot be compared with {self._folder}"
            )
        differ = [(self._different(files, place), files) for files in self._files]
        fewest, files = min(differ, key=lambda pair: len(pair[0]))
        if fewest:
            raise PlanMismatchError(
                f"{self._folder} has no plan for this: the closest, {files.folder.name}, was made for other "
                f"{', other '.join(fewest)}; compile without plan=, and save the plan again"
            )
        bundle = read_bundle(files.folder, allow_code=True)
        _require_own_ops(bundle, files.folder)
        place.known = read_known(files.folder)
        if place.known is None:
            raise FormatError(
                f"{files.folder} does not say what it depends on; save the plan again"
            )
        if broken := place.broken(place.known):
            raise PlanMismatchError(f"the plan in {files.folder} does not hold any more: {broken}")
        return bundle

    def check(self, made: PlannedStep) -> None:
        """Return if a plan was made for its program, by what its ops read and write.

        Raises:
            PlanMismatchError: names the op or tensor and both figures.
            UnsupportedOpError: an op of the program cannot run on fake tensors.
        """
        expected = step_workload(made.program, made.plan.machine, traced=False)
        check_workload(made.plan.workload, expected, measured=True)

    def _different(self, files: BundleFiles, place: CachedPlan) -> list[str]:
        was = files.plan.fingerprint
        return [said for key, said in _REQUIRED.items() if was.get(key) != place.prints[key]]


def _plans_in(folder: Path) -> list[Path]:
    """Return the bundles in a folder, or itself where it is one."""
    if (folder / "manifest.json").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/manifest.json"))


def _require_own_ops(bundle: Bundle, folder: Path) -> None:
    for node in bundle.program.op_nodes():
        if isinstance(node.target, torch._ops.OpOverload) and not is_step_op(str(node.target)):
            raise FormatError(f"{folder} calls {node.target}, which is no op of a saved step")


def is_step_op(name: str) -> bool:
    """Return whether a saved step may call an op: those of saved models, their gradients and updates."""
    packet = name.rpartition(".")[0]
    is_gradient = name.startswith("aten.") and packet.endswith(_BACKWARD)
    return is_allowed(name) or is_gradient or name.startswith((*_STEP_OPS, _NORM))
