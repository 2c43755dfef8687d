"""Models of the Hugging Face Hub by name: their folder in the Hub's own cache, downloaded where they are not there."""

from __future__ import annotations

from pathlib import Path

from gascompile.core.errors import CheckpointError, first_line_of
from gascompile.weights.checkpoint import has_named_safetensors

_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "model*.safetensors"]
"""Of a model and its tokenizer; formats that are not read in place are left where they are."""
_PICKLED = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
"""Where a model has no other weights: most have both."""


def fetch(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model such as ``"Qwen/Qwen3-0.6B"``.

    Args:
        name: on the Hub.
        revision: a branch, a tag or a commit of its repository; the main branch by default.

    Raises:
        CheckpointError: there is no such model, it cannot be reached, or ``huggingface_hub`` is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name[:1000]!r} is no folder, and huggingface_hub, which finds models by name, is not installed"
        ) from error
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
        if not has_named_safetensors(folder):
            files = [*_FILES, *_PICKLED]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=files))
        return folder
    except (OSError, ValueError) as error:
        # What the library raises is one of these, whatever went wrong.
        reason = first_line_of(error, 1000)
        raise CheckpointError(
            f"{name[:1000]!r} is neither a folder here nor a model that could be fetched from the Hugging Face Hub: "
            f"{reason} Check the name and the connection (HF_HUB_OFFLINE, HF_TOKEN), or pass a folder"
        ) from error
