"""Hugging Face transformers: its directories, its models on the meta device, its output types."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree as pytree

from gascompile.core.errors import CaptureError, CheckpointError, FormatError
from gascompile.core.files import is_file
from gascompile.core.serial import read_json
from gascompile.weights.checkpoint import kind_of_weights, open_checkpoint
from gascompile.weights.file_kinds import is_gguf
from gascompile.weights.quantisation import quantisation_of, scheme_of


def register_pytrees() -> None:
    """Teach torch's pytrees the cache types that transformers models return.

    Does nothing unless transformers is imported already.
    """
    if "transformers" not in sys.modules:
        return
    from transformers.cache_utils import EncoderDecoderCache

    _register_dynamic_cache()
    if EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            EncoderDecoderCache,
            lambda cache: ([cache.self_attention_cache, cache.cross_attention_cache], None),
            lambda values, _: EncoderDecoderCache(*values),
            serialized_type_name="transformers.cache_utils.EncoderDecoderCache",
            flatten_with_keys_fn=lambda cache: (
                [
                    (pytree.MappingKey("self_attention_cache"), cache.self_attention_cache),
                    (pytree.MappingKey("cross_attention_cache"), cache.cross_attention_cache),
                ],
                None,
            ),
        )
        register_pytree_flatten_spec(
            EncoderDecoderCache,
            lambda cache, _: [cache.self_attention_cache, cache.cross_attention_cache],
        )


def _register_dynamic_cache() -> None:
    from transformers.cache_utils import DynamicCache

    if DynamicCache in pytree.SUPPORTED_NODES:
        return
    # The library's own way copies keys and values into new ones, laid out otherwise than those of a cache that was
    # cropped, and forgets how many tokens a layer with a window has seen. It also imports all of the models' machinery.
    # Contexts are those of the library, as bundles hold them.
    pytree.register_pytree_node(
        DynamicCache,
        _parts_of_cache,
        _cache_of_parts,
        serialized_type_name="transformers.cache_utils.DynamicCache",
        flatten_with_keys_fn=lambda cache: _with_keys(*_parts_of_cache(cache)),
    )
    register_pytree_flatten_spec(DynamicCache, lambda cache, _: _parts_of_cache(cache)[0])


def _parts_of_cache(cache: Any) -> tuple[list[Any], Any]:
    for layer in cache.layers:
        if type(layer).__name__ not in _LAYERS:
            raise CaptureError(
                f"a layer's past is a {type(layer).__name__}, which a plan cannot return; pass use_cache=False, or set "
                "model.config.use_cache = False"
            )
    held = [layer for layer in cache.layers if layer.keys is not None]
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    parts = [[layer.keys for layer in held], [layer.values for layer in held]]
    context: list[Any] = [["key_cache", "value_cache"], windows]
    seen = [_seen(layer) for layer in cache.layers]
    # What shapes do not tell: such a cache is of another structure.
    return parts, [*context, seen] if any(seen) else context


_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})


def returns_past(config: Any) -> bool:
    """Return whether plans can return what a model of this configuration keeps of the tokens before."""
    from transformers.cache_utils import DynamicCache

    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except Exception:  # noqa: BLE001 - other configurations than those of decoders raise what they like
        return True
    return all(type(layer).__name__ in _LAYERS for layer in layers)


def _seen(layer: Any) -> list[Any] | None:
    """Return the tokens that a layer with a window has seen, if it has not kept all, and whether it keeps more."""
    if layer.keys is None or not getattr(layer, "is_sliding", False):
        return None
    if layer.cumulative_length == layer.keys.shape[-2] and not layer.record_past:
        return None
    return [int(layer.cumulative_length), layer.record_past]


def _with_keys(parts: list[Any], context: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
    names: list[pytree.KeyEntry] = [pytree.MappingKey(name) for name in context[0]]
    return list(zip(names, parts, strict=True)), context


def _cache_of_parts(parts: Iterable[Any], context: Any) -> Any:
    from transformers.cache_utils import (
        Cache,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )

    lists: dict[str, list[torch.Tensor]] = dict(zip(context[0], parts, strict=True))
    windows: list[int | None] = context[1]
    seen = context[2] if len(context) > 2 else [None] * len(windows)
    cache: Any = DynamicCache()
    if windows:
        layers: list[Any] = [
            DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
            for window in windows
        ]
        Cache.__init__(cache, layers=layers)
    for layer, past, count in zip_longest(
        cache.layers, zip(lists["key_cache"], lists["value_cache"], strict=True), seen
    ):
        if past is None:
            continue
        layer.lazy_initialization(*past)
        # As they are: their strides are part of a call.
        layer.keys, layer.values = past
        if layer.is_sliding:
            layer.cumulative_length, layer.record_past = count or (past[0].shape[-2], False)
    return cache


def register_types(modules: Iterable[str]) -> None:
    """Import the parts of transformers that define the types that a saved program takes or returns.

    Args:
        modules: those that ``call_types.transformers_modules`` found.

    Raises:
        FormatError: transformers, or a part of it, is missing.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise FormatError(
                f"this program takes or returns a type of '{module}', which cannot be imported ({error}); install "
                "the version of transformers that it was captured with"
            ) from error
    register_pytrees()


def register_ops(targets: Collection[str]) -> None:
    """Import the parts of transformers that register the ops of a saved program."""
    if any(target.startswith("transformers.grouped_mm") for target in targets):
        importlib.import_module("transformers.integrations.moe")


def is_model_directory(path: Path) -> bool:
    """Return whether ``path`` is a directory with a ``config.json``, or a GGUF file."""
    return is_file(path / "config.json") or is_gguf(path)


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def build_skeleton(path: Path, *, dtype: str | None = None) -> nn.Module:
    """Return the model of a Hugging Face directory or a GGUF file, on the meta device but for buffers, in eval mode.

    ``dtype`` overrides the configuration's, with torch's name. Needs no weights.

    Raises:
        CheckpointError: transformers is missing, or does not know the architecture.
    """
    try:
        import transformers
        from accelerate import init_empty_weights
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a Hugging Face directory, which needs transformers and accelerate ({error}); "
            "install them with: pip install 'gascompile[hf]'"
        ) from error
    config, where = _config(path)
    named = getattr(config, "architectures", None)
    architecture = named[0] if isinstance(named, list) and named else None
    cls: Any = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    is_model = isinstance(cls, type) and issubclass(cls, nn.Module)
    if cls is not None and not is_model:
        raise CheckpointError(f"{where}: {architecture!r} is no model of transformers")
    wanted = getattr(cls, "config_class", None)
    if isinstance(wanted, type) and not isinstance(config, wanted):
        raise CheckpointError(
            f"{where}: {architecture} is built from a {wanted.__name__}, and its model_type makes a "
            f"{type(config).__name__}; download it again"
        )
    chosen = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if chosen not in ("float64", "float32", "float16", "bfloat16"):
        raise CheckpointError(f"{where}: {chosen!r} is no dtype of a model")
    auto: Any = transformers.AutoModelForCausalLM if is_gguf(path) else transformers.AutoModel
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, chosen))
    try:
        with init_empty_weights(include_buffers=False):
            model = cls(config) if cls else auto.from_config(config)
    except Exception as error:  # as do its models, wherever they use a setting first
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot build the model of {where}: "
            f"{_in_short(error)}"
        ) from error
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    assert isinstance(model, nn.Module)
    if getattr(config, "use_cache", False) and not returns_past(config):
        config.use_cache = False  # as its owner would have to
    _load_generation_config(model, path)
    return model.eval()


def _load_generation_config(model: Any, path: Path) -> None:
    """Take over what the directory says about generation, such as the tokens that end a text.

    Raises:
        CheckpointError: it cannot be read.
    """
    if (path / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        try:
            config = GenerationConfig.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}/generation_config.json cannot be used: {_in_short(error)}; download it again, or remove it"
            ) from error
        model.generation_config = config


def _config(path: Path) -> tuple[Any, str]:
    """Return the configuration of a directory or a GGUF file, and what errors call it."""
    import transformers

    said: Mapping[str, Any] = {}
    if is_gguf(path):
        # Refuses what is damaged, before a reader that trusts it.
        said = open_checkpoint(path).gguf or {}
        where, place, kwargs = str(path), path.parent, {"gguf_file": path.name}
    else:
        where, place, kwargs = f"{path}/config.json", path, {}
        # A damaged file gets our error, not transformers' guess at a hub name.
        data = read_json(path / "config.json", strict=False)
        if not isinstance(data, dict):
            raise CheckpointError(f"{where} holds no object; download it again")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(place), local_files_only=True, **kwargs
        )
    except Exception as error:  # transformers and its validators raise what they like
        raise CheckpointError(f"{where} cannot be used: {_in_short(error)}") from error
    if not kwargs:
        return _without_quantisation(config, path), where
    # Their table of the families' settings does not have it for each.
    width = said.get(f"{said.get('general.architecture')}.attention.key_length")
    if isinstance(width, int) and getattr(config, "head_dim", None) is not None:
        config.head_dim = width
    return config, where


def _without_quantisation(config: Any, path: Path) -> Any:
    """Return the configuration of the model before it was quantised, which is what is built.

    Raises:
        CheckpointError: the folder has no weights, whose headers alone say how they are packed.
    """
    quantisation = quantisation_of(path)
    if quantisation:
        scheme_of(quantisation, str(path))
        if kind_of_weights(path) != "safetensors":
            raise CheckpointError(
                f"{path} says that its weights are quantised and holds no .safetensors file, so that it is not known "
                "what they take; put the files there, or plan the model's folder from before it was quantised"
            )
        del config.quantization_config
    return config


def ignorable_weights(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the checkpoint names that transformers itself ignores for this model class."""
    patterns: list[str] = []
    for module in model.modules():
        patterns += getattr(module, "_keys_to_ignore_on_load_unexpected", None) or []
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def transformers_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> model of the outermost transformers models in ``model``; ``""`` for itself."""
    if "transformers" not in sys.modules:
        return {}
    from transformers import PreTrainedModel

    models: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(outer == "" or path.startswith(f"{outer}.") for outer in models)
        if isinstance(module, PreTrainedModel) and not inside:
            models[path] = module
    return models


def strip_prefix(model: Any, names: Collection[str], wanted: Collection[str]) -> Mapping[str, str]:
    """Return checkpoint name -> model name where the two differ by the base model's prefix."""
    prefix = f"{model.base_model_prefix}." if getattr(model, "base_model_prefix", "") else ""
    result = {}
    for name in names:
        if name not in wanted and prefix:
            bare = name.removeprefix(prefix)
            if bare != name and bare in wanted:
                result[name] = bare
            elif f"{prefix}{name}" in wanted:
                result[name] = f"{prefix}{name}"
    return result
