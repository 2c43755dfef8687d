"""What a result file says about the machine and the software it was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "pulp", "highspy", "gascompile")


def describe_environment() -> dict[str, Any]:
    """Return processor, memory, kernel and versions."""
    return {
        "processor": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch_threads": torch.get_num_threads(),
        "versions": {name: installed_version(name) for name in _PACKAGES},
    }


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; ``None`` where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def result_path(theme: str) -> Path:
    """Return ``benchmarks/results/<theme>-<machine>-<date>.json``."""
    model = re.sub(r"\(r\)|\(tm\)| processor", "", _cpu_model().lower())
    machine = f"{model}-{os.cpu_count()}cores".replace(" ", "-")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Path(__file__).parent / "results" / f"{theme}-{machine}-{date}.json"


def headed(benchmark: str) -> dict[str, Any]:
    """Return what a result begins with: the benchmark, the date and the environment."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"benchmark": benchmark, "date": date, "environment": describe_environment()}


def write_result(result: dict[str, Any], output: Path | None) -> Path:
    """Write a result where it was asked for, or among the others; return where."""
    path = output or result_path(result["benchmark"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
