"""``gascompile.from_pretrained``: a model by its folder or its name, compiled for a budget."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gascompile.api.sources import require_sense
from gascompile.core.model_libraries import model_libraries

if TYPE_CHECKING:
    from gascompile.api.compiled import CompiledModel
    from gascompile.core.budget import Budget


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    budget: Budget | int | str | None = None,
    *,
    revision: str | None = None,
    **options: Any,
) -> CompiledModel:
    """Compile a model by its folder, or by its name on the Hugging Face Hub; its weights are read in place.

    It computes in the dtype of its files, whatever its configuration says.

    Args:
        name_or_path: a Hugging Face directory, a ``.gguf`` file or a name such as ``"Qwen/Qwen3-0.6B"``, which is
            downloaded to the Hub's cache once.
        budget: memory the runtime may allocate in the tier that computes (``"8GiB"``, bytes), or a ``Budget``.
        revision: of a model by name: a branch, a tag or a commit.
        options: as ``gascompile.compile`` takes them.

    Raises:
        CheckpointError: there is no such model, or its weights cannot be read.
        InfeasiblePlanError: the budget is too small; names the smallest feasible one.
        ValueError: ``budget`` is no size, or ``revision`` is given for a path.
    """
    from gascompile.api.compile import compile as compile_model

    require_sense(budget, options.get("strategy"))
    path = Path(name_or_path)
    # Of os: what is too long for a path is not there, either.
    if os.path.exists(path):
        if revision is not None:
            raise ValueError(f"revision is of a name on the Hub, and {path} is here; leave it out")
    else:
        library = model_libraries()[0]  # of names on the Hub
        path = library.fetch(os.fspath(name_or_path), revision)
    return compile_model(path, budget, **options)
