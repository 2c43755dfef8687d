"""Read names: of what ran in a capture, the names that say which attributes it may have read."""

from __future__ import annotations

import types
from dataclasses import replace

from torch import nn

from gascompile.capture.fingerprint.code_names import names_of
from gascompile.capture.fingerprint.code_origin import Origin, key_of, origin_of_file
from gascompile.capture.record.containers import goes_over_attributes
from gascompile.capture.record.watched import Reads
from gascompile.capture.record.watches import Code

_LAYERS = "torch/nn/modules/"
_GENERAL = f"{_LAYERS}module.py"
_SCHEDULES = "/torch/optim/lr_scheduler.py"
"""Has objects that a program steps and asks; names of other parts of torch, such as ``scale``, are those of many."""


def reads_of(code: list[Code], model: nn.Module) -> Reads:
    """Return the names that count: those in the program's and libraries' code and in that of torch's layers."""
    files = {
        made.__code__.co_filename
        for module in model.modules()
        for base in type(module).__mro__
        if isinstance(made := vars(base).get("__init__"), types.FunctionType)
    }
    names: set[str] = set()
    by_name = False
    for body, _ in code:
        origin = origin_of_file(body.co_filename)
        if not origin.versioned:
            here = names_of(body)
            names |= here.attributes.union(*here.chains)
            by_name = by_name or here.by_name
        elif goes_over_attributes(body):
            by_name = True
        elif _counts(body, origin, files):
            names.update(body.co_names)
            names.update(c for c in body.co_consts if isinstance(c, str) and c.isidentifier())
    ran = frozenset(key_of(body) for body, _ in code)
    return Reads(names=None if by_name else frozenset(names), ran=ran)


def with_python(reads: Reads, code: list[Code]) -> Reads:
    """Return what counts of what a capture changes: what Python's own code reads in its classes, too."""
    if reads.names is None:
        return reads
    bodies = [body for body, _ in code if origin_of_file(body.co_filename) is Origin.PYTHON]
    return replace(reads, names=reads.names.union(*(body.co_names for body in bodies)))


def _counts(code: types.CodeType, origin: Origin, files: set[str]) -> bool:
    """Return whether the names in a library's code say what is read of a module."""
    path = code.co_filename
    return (
        origin is Origin.INSTALLED
        or (path in files and not path.endswith(_GENERAL))
        or (origin is Origin.TORCH and path.endswith(_SCHEDULES))
    )


def is_of_library(code: types.CodeType) -> bool:
    """Return whether code is an installed library's, or that of one of torch's layers, and no part of how these run."""
    path = code.co_filename
    origin = origin_of_file(path)
    return origin is Origin.INSTALLED or (
        origin is Origin.TORCH and _LAYERS in path and not path.endswith(_GENERAL)
    )
