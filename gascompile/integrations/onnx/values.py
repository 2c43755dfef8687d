"""Values of an ONNX graph while it runs: tensors, and sizes that Python knows.

ONNX computes shapes with ops on int64 tensors. Those that come from shapes and constants are kept as numbers, a list of
them for a tensor of one dimension, so that they are sizes to torch, of a range of which a plan can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gascompile.core.errors import UnsupportedOpError

if TYPE_CHECKING:
    import torch
else:
    from gascompile.integrations.onnx.backend import torch

Known: TypeAlias = "int | torch.SymInt | list[Any]"
"""A number, or those of a tensor of one dimension; of int64."""
Value: TypeAlias = "torch.Tensor | int | torch.SymInt | list[Any]"


class Numbers(list[Any]):
    """A constant that may be sizes, with the tensor that it is where it is none."""

    held: Any = None

    @classmethod
    def of(cls, values: list[Any], held: Any) -> Numbers:
        """Return numbers with their tensor."""
        numbers = cls(values)
        numbers.held = held
        return numbers


def is_known(*values: Any) -> bool:
    """Return whether values are sizes that Python knows."""
    return all(isinstance(v, (int, torch.SymInt, list)) for v in values)


def tensor(value: Any, kind: str = "int64") -> torch.Tensor:
    """Return a value as a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Numbers) and value.held is not None:
        held: torch.Tensor = value.held
        return held
    dtype = getattr(torch, kind)
    parts = value if isinstance(value, list) else [value]
    if parts and all(isinstance(part, bool) for part in parts):
        return torch.tensor(value)  # of a comparison
    if all(isinstance(part, (int, float)) for part in parts):
        return torch.tensor(value, dtype=dtype)
    if parts and not any(isinstance(part, (int, float, torch.SymInt)) for part in parts):
        dtype = torch.bool  # of a comparison of sizes that change from call to call
    scalars = [torch.scalar_tensor(part, dtype=dtype) for part in parts]
    return torch.stack(scalars) if isinstance(value, list) else scalars[0]


def sizes(value: Any, what: str) -> list[Any]:
    """Return a list of sizes; raises ``UnsupportedOpError`` where they are only known when the model runs."""
    if isinstance(value, list):
        return list(value)
    if is_known(value):
        return [value]
    raise UnsupportedOpError(
        f"its {what} is computed from the model's inputs, so no plan can know sizes; export the model with it constant"
    )


def number(value: Any, what: str) -> Any:
    """Return one number; raises ``UnsupportedOpError`` as ``sizes`` does."""
    if isinstance(value, float):
        return value
    numbers = sizes(value, what)
    if len(numbers) != 1:
        raise UnsupportedOpError(f"its {what} has {len(numbers)} values, where one is needed")
    return numbers[0]


def each(compute: Callable[..., Any], *values: Known) -> Known:
    """Compute with known numbers, one by one, as tensors of one dimension are broadcast."""
    lists = [value for value in values if isinstance(value, list)]
    if not lists:
        return compute(*values)  # type: ignore[no-any-return]
    length = max((len(numbers) for numbers in lists if len(numbers) != 1), default=1)
    if any(len(numbers) not in (1, length) for numbers in lists):
        raise UnsupportedOpError(f"its inputs have {[len(numbers) for numbers in lists]} values")
    rows = [
        value * length if isinstance(value, list) and len(value) == 1
        else value if isinstance(value, list) else [value] * length
        for value in values
    ]  # fmt: skip
    return [compute(*row) for row in zip(*rows, strict=True)]


def wrapped(indices: torch.Tensor, length: Any) -> torch.Tensor:
    """Return indices of which negative ones count from the end, as indices from the begin."""
    return torch.where(indices < 0, indices + length, indices)


def dims_of(axes: Sequence[int], rank: int) -> list[int]:
    """Return axes counted from the first, each once; raises ``UnsupportedOpError``."""
    dims = [axis + rank if axis < 0 else axis for axis in axes]
    if len(set(dims)) != len(dims) or any(not 0 <= axis < rank for axis in dims):
        raise UnsupportedOpError(f"its axes are {list(axes)}, of {rank} dimensions")
    return dims
