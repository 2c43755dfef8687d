"""Which tests of transformers are run, and which do not apply to compiled models and why."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

FAMILIES = ("llama", "gpt2", "gemma2", "t5", "whisper", "qwen2_vl")
"""Folders of ``tests/models``: decoders with full and mixed attention, encoder-decoders, and one that reads images."""
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
_NAN = (
    "trains on with a loss that is NaN; a planned step stops before the update, with NanLossError, and goes on with "
    "step_options={'on_nan': 'ignore'}"
)
_ADAFACTOR = (
    "reads the rate that AdafactorSchedule tells by gradients and states, which the planned step keeps; updates are "
    "those of Trainer, and a warning says that logs are not"
)
_RANDOM = (
    "the model draws numbers by Python's random and NumPy in its forward, which a captured step would repeat; it "
    "is refused with CaptureError, which names the draws"
)
_GROWS = "the model assigns a larger buffer at each call, which is refused with CaptureError: plans write in place"
_SPLITS = (
    "calls the model as a whole with images, whose attention is split by values of image_grid_thw; refused with "
    "CaptureError, generate() is not"
)
NOT_APPLICABLE: Mapping[str, str] = {
    "*::test_generate_compile_model_forward_fullgraph*": _TORCH_COMPILE,
    "*::test_generate_compilation_all_outputs": _TORCH_COMPILE,
    "*::test_static_cache_no_recompile_with_smaller_length": _TORCH_COMPILE,
    "*::test_logging_inf_nan_filter": _NAN,
    "*::test_adafactor_lr_none": _ADAFACTOR,
    "*::test_resume_training_with_different_batch_size": _RANDOM,
    "*::test_training_with_resume_from_checkpoint_false": _RANDOM,
    "*::test_auto_batch_size_with_resume_from_checkpoint": _RANDOM,
    "*::test_resume_batch_order": _GROWS,
    "*::Qwen2VLModelTest::test_left_padding_compatibility": _SPLITS,
    "*::Qwen2VLModelTest::test_past_key_values_format": _SPLITS,
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
