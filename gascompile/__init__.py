"""GASCompile: run PyTorch models that do not fit, by an ahead-of-time plan.

``compile`` plans a model for a memory budget and returns it ready to run, ``from_pretrained`` one by its name;
``plan`` only plans, without weights; ``load`` opens a saved bundle; ``simulate`` replays a plan on a machine;
``export`` writes a model as ONNX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gascompile.core import model_libraries
from gascompile.core.collection import no_collection

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gascompile.api.compile import compile as compile
    from gascompile.api.compiled import CompiledModel as CompiledModel
    from gascompile.api.from_pretrained import from_pretrained as from_pretrained
    from gascompile.api.load import load as load
    from gascompile.api.plan import plan as plan
    from gascompile.api.plan import simulate as simulate
    from gascompile.core.budget import Budget as Budget
    from gascompile.core.errors import CaptureError as CaptureError
    from gascompile.core.errors import CheckpointError as CheckpointError
    from gascompile.core.errors import CompiledModelError as CompiledModelError
    from gascompile.core.errors import DeviceError as DeviceError
    from gascompile.core.errors import DeviceMapError as DeviceMapError
    from gascompile.core.errors import FormatError as FormatError
    from gascompile.core.errors import GASCompileError as GASCompileError
    from gascompile.core.errors import InfeasiblePlanError as InfeasiblePlanError
    from gascompile.core.errors import PlanMismatchError as PlanMismatchError
    from gascompile.core.errors import PlanVerificationError as PlanVerificationError
    from gascompile.core.errors import SolverError as SolverError
    from gascompile.core.errors import StorageError as StorageError
    from gascompile.core.errors import UnknownPlaceError as UnknownPlaceError
    from gascompile.core.errors import UnsupportedOpError as UnsupportedOpError
    from gascompile.core.machine import Machine as Machine
    from gascompile.core.plan import Plan as Plan
    from gascompile.core.reports import GraphReport as GraphReport
    from gascompile.core.reports import RunReport as RunReport
    from gascompile.core.reports import Timeline as Timeline
    from gascompile.core.workload import Workload as Workload
    from gascompile.integrations.onnx.export import export as export
    from gascompile.training.compile_step import compile_step as compile_step
    from gascompile.training.step import TrainingStep as TrainingStep

_HOMES = {
    "api.compile": ("compile",),
    "api.compiled": ("CompiledModel",),
    "api.from_pretrained": ("from_pretrained",),
    "api.load": ("load",),
    "api.plan": ("plan", "simulate"),
    "core.errors": (
        "CaptureError", "CheckpointError", "CompiledModelError", "DeviceError", "DeviceMapError",
        "FormatError", "GASCompileError", "InfeasiblePlanError", "PlanMismatchError",
        "PlanVerificationError", "SolverError", "StorageError", "UnknownPlaceError",
        "UnsupportedOpError",
    ),
    "core.budget": ("Budget",),
    "core.machine": ("Machine",),
    "core.plan": ("Plan",),
    "core.reports": ("GraphReport", "RunReport", "Timeline"),
    "core.workload": ("Workload",),
    "integrations.onnx.export": ("export",),
    "training.compile_step": ("compile_step",),
    "training.step": ("TrainingStep",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])  # noqa: PLE0605 - a computed list of the names above


model_libraries.register("gascompile.integrations.transformers_library")
model_libraries.register("gascompile.integrations.onnx.library")
model_libraries.register_costing(".onnx", "gascompile.integrations.onnx.outline_workload")


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``import gascompile`` stays light (PEP 562)."""
    if name == "errors":
        return importlib.import_module("gascompile.errors")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'gascompile' has no attribute {name!r}")
    # What modules are made of stays: 48 passes over it in the middle took 8 ms.
    with no_collection():
        value = getattr(importlib.import_module(f"gascompile.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
