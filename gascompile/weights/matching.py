"""Matching: which tensor of a checkpoint is which weight of a model; what is missing, extra or another is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from gascompile.core.errors import CheckpointError
from gascompile.core.sources import WeightSource
from gascompile.weights.checkpoint import Checkpoint
from gascompile.weights.tied import require_same

_QUANTISED = (
    ".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax", ".quant_map", ".SCB",
)  # fmt: skip
"""Ends of names that such checkpoints have, and plain ones have not."""


def aliases_of(canonical: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return all names of each tensor by its first one, which ``canonical`` has by each."""
    aliases: dict[str, tuple[str, ...]] = {}
    for name, first in canonical.items():
        aliases[first] = (*aliases.get(first, ()), name)
    return aliases


def match_weights(
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    checkpoint: Checkpoint,
    *,
    names: Mapping[str, tuple[str, ...]],
    ignorable: Iterable[str] = (),
    where: str,
    accepts: Callable[[str, str], bool] = operator.eq,
    store: Path | None = None,
) -> dict[str, WeightSource]:
    """Return the source of every expected weight.

    ``expected`` maps a weight to its dtype and shape, ``names`` to every name it has in the model (tied
    weights have several). Checkpoint entries that no weight claims are refused unless ``ignorable``.
    ``accepts`` says whether a weight stored in the first dtype may be computed in the second. What stands under several
    names of one weight has to be the same there; in ``store`` it is noted what was found so.

    Raises:
        CheckpointError: weights are missing, extra, or of another shape or dtype; tied ones differ.
    """
    _require_plain(checkpoint, {alias for n in expected for alias in names.get(n, (n,))}, where)
    source_of: dict[str, WeightSource] = {}
    missing, claimed = [], set(ignorable)
    for name, (dtype, shape) in expected.items():
        aliases = names.get(name, (name,))
        stored = [checkpoint.sources[a] for a in aliases if a in checkpoint.sources]
        source = stored[0] if stored else None
        claimed.update(aliases)
        if len({one.dtype for one in stored}) > 1:
            raise CheckpointError(
                f"'{name}' is one weight of several names in the model, which {where} has as {stored[0].dtype} and as "
                f"{stored[-1].dtype}; build the model without tied weights (tie_word_embeddings=False)"
            )
        if source is None:
            missing.append(name)
            continue
        for one in stored:
            _check_shape(one, name, shape, where)
        require_same(name, stored, where, store)
        if not accepts(source.dtype, dtype):
            raise _other_dtype(source, name, dtype, where)
        source_of[name] = source
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} weights that the model needs, the first being {_some(missing)}. "
            "Is it the checkpoint of this model class and configuration?"
        )
    extra = sorted(set(checkpoint.sources) - claimed)
    if extra:
        raise CheckpointError(
            f"{where} holds {len(extra)} weights that the model does not have, the first being {_some(extra)}. "
            "Is it the checkpoint of this model class and configuration?"
        )
    return source_of


def _require_plain(checkpoint: Checkpoint, known: Collection[str], where: str) -> None:
    """Refuse what quantised checkpoints hold beside their weights and nobody has put together."""
    odd = next((n for n in checkpoint.sources if n.endswith(_QUANTISED) and n not in known), None)
    if odd is not None:
        raise CheckpointError(
            f"{where} holds weights that are quantised ('{odd[:200]}') in a way that it does not say; pass the folder "
            "with their config.json, if its quantization_config names GPTQ, AWQ, compressed-tensors or fp8; or use a "
            "GGUF file of the model (Q4_K, Q6_K, Q8_0 or Q4_0), or its checkpoint before it was quantised, with "
            "weights='int4' or 'int8'"
        )


def _check_shape(source: WeightSource, name: str, shape: tuple[int, ...], where: str) -> None:
    if source.shape != shape:
        raise CheckpointError(
            f"'{name}' has the shape {list(source.shape)} in {where}, the model needs {list(shape)}; "
            "check the model's configuration"
        )


def _other_dtype(source: WeightSource, name: str, dtype: str, where: str) -> CheckpointError:
    message = (
        f"'{name}' has the dtype {source.dtype} in {where}, the model needs {dtype}; "
        f"build the model in that dtype, as in model.to(torch.{source.dtype})"
    )
    if dtype in ("bfloat16", "float16") and source.dtype in ("float32", "float64"):
        message += ', or pass weights="bf16" to round the checkpoint once, which loses precision'
    return CheckpointError(message)


def _some(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3])
