"""What a capture for ranges of sizes took for granted of several sizes at once.

``torch.export`` proves what it decides by one size for the whole range, or refuses it. What it decides by two, as
``x.shape[0] == y.shape[0]``, it writes down as a guard alone: the program is that of the example.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import bound_sympy


def unproven_relation(exported: torch.export.ExportedProgram) -> str | None:
    """Return the first relation of sizes that holds for the example and not for all sizes of the ranges, in words."""
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    for env in dict.fromkeys(_environments(placeholders)):
        for guard in env.guards:
            relation = guard.expr.xreplace(env.replacements)
            found = bound_sympy(relation, env.var_to_range)
            if not (found.is_singleton() and bool(found.lower)):
                return _in_words(relation, placeholders)
    return None


def _environments(placeholders: list[torch.fx.Node]) -> Iterator[ShapeEnv]:
    for node in placeholders:
        for size in _shape(node):
            if isinstance(size, torch.SymInt):
                yield size.node.shape_env


def _shape(node: torch.fx.Node) -> tuple[int | torch.SymInt, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _in_words(relation: Any, placeholders: list[torch.fx.Node]) -> str:
    """Return a relation with the names of inputs in the place of symbols."""
    text = str(relation)
    for node in placeholders:
        for place, size in enumerate(_shape(node)):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                text = re.sub(rf"\b{size.node.expr}\b", f"{node.name}.shape[{place}]", text)
    return text
