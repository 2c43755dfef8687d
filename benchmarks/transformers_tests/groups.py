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

NOT_APPLICABLE: Mapping[str, str] = {}
"""By pattern of names: why what a test asserts is not so of a compiled model."""


def why_not(name: str) -> str | None:
    """Return why a test that fails does not apply; ``None`` for a defect."""
    for pattern, reason in NOT_APPLICABLE.items():
        if fnmatchcase(name, pattern):
            return reason
    return None
