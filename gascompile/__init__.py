"""GASCompile: run PyTorch models that do not fit, by an ahead-of-time plan.

``compile`` plans a model for a memory budget and returns it ready to run; ``plan`` only plans, without
weights; ``load`` opens a saved bundle; ``simulate`` replays a plan on a machine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gascompile.compiled import CompiledModel as CompiledModel
    from gascompile.errors import CaptureError as CaptureError
    from gascompile.errors import CheckpointError as CheckpointError
    from gascompile.errors import DeviceError as DeviceError
    from gascompile.errors import DeviceMapError as DeviceMapError
    from gascompile.errors import FormatError as FormatError
    from gascompile.errors import GASCompileError as GASCompileError
    from gascompile.errors import InfeasiblePlanError as InfeasiblePlanError
    from gascompile.errors import PlanMismatchError as PlanMismatchError
    from gascompile.errors import PlanVerificationError as PlanVerificationError
    from gascompile.errors import SolverError as SolverError
    from gascompile.errors import StorageError as StorageError
    from gascompile.errors import UnsupportedOpError as UnsupportedOpError
    from gascompile.ir import Budget as Budget
    from gascompile.ir import Machine as Machine
    from gascompile.ir import Plan as Plan
    from gascompile.ir import Workload as Workload
    from gascompile.loading import load as load
    from gascompile.pipeline import compile as compile
    from gascompile.planning import plan as plan
    from gascompile.planning import simulate as simulate
    from gascompile.reports import GraphReport as GraphReport
    from gascompile.reports import RunReport as RunReport
    from gascompile.reports import Timeline as Timeline
    from gascompile.training.compile_step import compile_step as compile_step
    from gascompile.training.step import TrainingStep as TrainingStep

_HOMES = {
    "compiled": ("CompiledModel",),
    "errors": (
        "CaptureError", "CheckpointError", "DeviceError", "DeviceMapError", "FormatError",
        "GASCompileError", "InfeasiblePlanError", "PlanMismatchError", "PlanVerificationError",
        "SolverError", "StorageError", "UnsupportedOpError",
    ),
    "ir": ("Budget", "Machine", "Plan", "Workload"),
    "loading": ("load",),
    "pipeline": ("compile",),
    "planning": ("plan", "simulate"),
    "reports": ("GraphReport", "RunReport", "Timeline"),
    "training.compile_step": ("compile_step",),
    "training.step": ("TrainingStep",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])  # noqa: PLE0605 - a computed list of the names above


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``import gascompile`` stays light (PEP 562)."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'gascompile' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gascompile.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
