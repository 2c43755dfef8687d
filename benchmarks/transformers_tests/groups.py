"""Which tests of transformers are run, and which do not apply to compiled models and why."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "qwen2", "t5")
"""Folders of ``tests/models``: decoders with full, windowed and mixed attention, and an encoder-decoder."""
TRAINING = (
    "test_trainer.py",
    "test_trainer_callback.py",
    "test_trainer_checkpointing.py",
    "test_trainer_data.py",
    "test_trainer_evaluation.py",
    "test_trainer_hyperparameter.py",
    "test_trainer_optimizers.py",
    "test_trainer_seq2seq.py",
)
"""Files of ``tests/trainer`` that need neither several processes nor an accelerator."""

_TORCH_COMPILE = (
    "asserts that generate() has called torch.compile; a compiled model has plans in its place, and refuses the caches "
    "that are made for it"
)
_CLASS_OF_CACHE = "asserts a StaticCache where one is asked for; a compiled decoder fills one of fixed size of its own"
NOT_APPLICABLE: Mapping[str, str] = {
    "*::test_generate_compile_model_forward_fullgraph*": _TORCH_COMPILE,
    "*::test_generate_compilation_all_outputs": _TORCH_COMPILE,
    "*::test_static_cache_no_recompile_with_smaller_length": _TORCH_COMPILE,
    "*::test_generate_with_static_cache": _CLASS_OF_CACHE,
    "*::test_generate_from_inputs_embeds_with_static_cache": _CLASS_OF_CACHE,
}
"""By pattern of names: why what a test asserts is not so of a compiled model."""


def why_not(name: str) -> str | None:
    """Return why a test that fails does not apply; ``None`` for a defect."""
    for pattern, reason in NOT_APPLICABLE.items():
        if fnmatchcase(name, pattern):
            return reason
    return None
