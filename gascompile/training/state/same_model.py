"""Same model: whether a state is of the model that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gascompile.core.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


def require_same(model: str, shapes: Shapes, wanted: Shapes) -> None:
    """Refuse a state that has other tensors than the model.

    Args:
        model: name of its class.
        shapes: of the state's tensors.
        wanted: of the model's.

    Raises:
        CheckpointError: names the keys.
    """
    missing, extra = sorted(set(wanted) - set(shapes)), sorted(set(shapes) - set(wanted))
    other = [n for n in sorted(set(wanted) & set(shapes)) if wanted[n] != shapes[n]]
    said = [f"lacks {_some(missing)}"] if missing else []
    said += [f"has {_some(extra)} that the model does not"] if extra else []
    said += [
        f"has '{name}' as {list(shapes[name])} where the model's is {list(wanted[name])}"
        for name in other[:3]
    ]
    if said:
        raise CheckpointError(
            f"the state is of another model than {model}: it {'; it '.join(said)}"
        )


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state's tensors."""
    return {n: tuple(value.shape) for n, value in state.items() if isinstance(value, torch.Tensor)}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


def require_moments(
    parameter: str, entry: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> None:
    """Refuse what an optimizer's state has of a parameter, where moments are missing or of another shape.

    Raises:
        CheckpointError: names the first that is.
    """
    for key, shape in shapes.items():
        value = entry.get(key)
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            raise CheckpointError(
                f"the optimizer's state has no '{key}' of shape {list(shape)} for '{parameter}'; "
                "it is of another model or optimizer"
            )


def require_begun(parameter: str, entry: Mapping[str, Any], first: Mapping[str, float]) -> None:
    """Refuse moments that were changed before their first update, which begins with those of ``first``.

    Raises:
        CheckpointError: names the first that was.
    """
    for key, value in first.items():
        begun = int(entry["step"]) > 0 or entry[key].is_meta
        if not begun and bool((entry[key] != value).any()):
            raise CheckpointError(
                f"'{key}' of '{parameter}' is not {value} before its first update, as the optimizer's group has it"
            )
