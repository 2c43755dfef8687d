"""Families of models and modes of ``generate``: what tests compare with transformers' own, token for token."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch
import transformers

from gascompile.integrations.cache_argument import argument_in, cache_argument

HELD = cache_argument(transformers.LlamaForCausalLM.forward)
"""The name under which models take a cache."""

SMALL: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0,
    "bos_token_id": 1, "dtype": "float32", "initializer_range": 0.2,
}  # fmt: skip
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_MIXED: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_VISION: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_ROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
IMAGE = 50
"""The token that stands for a piece of an image."""

DECODERS: dict[str, dict[str, Any]] = {
    "Bloom": {"n_layer": 2, "n_head": 4},
    "CodeGen": _GPT | {"rotary_dim": 8},
    "Cohere": {},
    "Cohere2": {"sliding_window": 8, "layer_types": _MIXED["layer_types"]},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8,
    },
    "Falcon": {},
    "GPT2": _GPT,
    "GPTBigCode": _GPT,
    "GPTJ": _GPT | {"rotary_dim": 8},
    "GPTNeo": {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4,
    },
    "GPTNeoX": {},
    "Gemma": {"head_dim": 8},
    "Gemma2": _MIXED,
    "Gemma3": _MIXED,
    "Glm": {"head_dim": 8},
    "GptOss": _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Granite": {},
    "Llama": {},
    "Llama4": {
        "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8,
    },
    "Mamba": {"state_size": 4},
    "Mistral": {"sliding_window": 8},
    "Mixtral": {"num_local_experts": 2, "sliding_window": None},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo2": {},
    "Phi": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen2Moe": _MOE | {"shared_expert_intermediate_size": 16},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": _MOE | {"head_dim": 8},
    "StableLm": {},
    "Starcoder2": {},
}  # fmt: skip
_CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "Bart": "BartForConditionalGeneration",
    "T5": "T5ForConditionalGeneration",
    "Whisper": "WhisperForConditionalGeneration",
    "Llava": "LlavaForConditionalGeneration",
    "Qwen2VL": "Qwen2VLForConditionalGeneration",
}
_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "max_position_embeddings": 128, "dtype": "float32",
}  # fmt: skip
OTHERS: dict[str, Callable[[], Any]] = {
    "Bart": lambda: transformers.BartConfig(**_SEQ2SEQ),
    "T5": lambda: transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=2,
    ),
    "Whisper": lambda: transformers.WhisperConfig(
        **_SEQ2SEQ | {"max_position_embeddings": None}, max_source_positions=20, max_target_positions=128,
        num_mel_bins=8, suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "Llava": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SMALL), vision_config=transformers.CLIPVisionConfig(**_VISION),
        image_token_index=IMAGE, vision_feature_layer=-1,
    ),
    "Qwen2VL": lambda: transformers.Qwen2VLConfig(
        text_config=SMALL | {"model_type": "qwen2_vl_text", "rope_parameters": _ROPE},
        vision_config={
            "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=IMAGE, vision_start_token_id=51, vision_end_token_id=52, video_token_id=53,
    ),
}  # fmt: skip
"""Models that read more than text, and what makes their configurations."""


def past_of(result: Any) -> Any:
    """Return the cache that a result has."""
    return getattr(result, argument_in(vars(result)))


def made(family: str) -> Any:
    """Return the small random model of a family."""
    torch.manual_seed(0)
    library: Any = transformers
    if family in OTHERS:
        config = OTHERS[family]()
    else:
        config = getattr(library, _CONFIGS.get(family, f"{family}Config"))(
            **SMALL | DECODERS[family]
        )
    model = getattr(library, _CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide, so that the most probable token stands out and depends on all before it.
                parameter.normal_(0, 0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    if family == "T5":
        model.generation_config.decoder_start_token_id = 0
    return model


def text(*shape: int, seed: int = 5) -> torch.Tensor:
    """Return random tokens that mean nothing in particular."""
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(seed))


def prompt(family: str) -> dict[str, Any]:
    """Return what a family reads: 14 tokens, half of which repeat, an image or sounds."""
    ids = torch.cat((text(1, 7), text(1, 7)), 1)
    if family == "Whisper":
        return {"input_features": torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(1))}
    if family == "Llava":
        ids[:, 1:5] = IMAGE
        pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "pixel_values": pixels}
    if family == "Qwen2VL":
        ids[:, 0], ids[:, 1:5], ids[:, 5] = 51, IMAGE, 52
        pixels = torch.randn(16, 96, generator=torch.Generator().manual_seed(1))
        return {
            "input_ids": ids,
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (ids == IMAGE).long(),
        }
    return {"input_ids": ids}


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.append([])


def tokenizer() -> Any:
    """Return a tokenizer of sixty characters with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", *string.ascii_letters, *" .,:!"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    library: Any = transformers
    found = library.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    found.chat_template = "{% for m in messages %}u: {{ m['content'] }}. {% endfor %}a: "
    return found


def _banned() -> dict[str, Any]:
    rule = transformers.NoRepeatNGramLogitsProcessor(1)
    return {"logits_processor": transformers.LogitsProcessorList([rule]), "repetition_penalty": 1.3}


def _stopped() -> dict[str, Any]:
    rules = transformers.StoppingCriteriaList(
        [lambda ids, scores: torch.full((ids.shape[0],), ids.shape[1] >= 17)]
    )
    return {"stopping_criteria": rules}


MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "sample": lambda: {"do_sample": True, "top_k": 5, "temperature": 0.7},
    "top_p of three": lambda: {"do_sample": True, "top_p": 0.8, "num_return_sequences": 3},
    "beams": lambda: {"num_beams": 3, "num_return_sequences": 2},
    "beams, sampled": lambda: {"num_beams": 3, "do_sample": True, "length_penalty": 0.5},
    "processors": _banned,
    "stopping criteria": _stopped,
    "stop strings": lambda: {"stop_strings": ["q", "aU", "OO"], "tokenizer": tokenizer()},
    "streamer": lambda: {"streamer": Heard()},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "prompt lookup, sampled": lambda: {"prompt_lookup_num_tokens": 3, "do_sample": True, "top_k": 3},
    "assistant": lambda: {"assistant_model": made("Llama")},
    "assistant, sampled": lambda: {"assistant_model": made("Llama"), "do_sample": True, "top_k": 3},
    "scores": lambda: {
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True,
    },
    "negative prompt": lambda: {"guidance_scale": 1.5},
    "chunks": lambda: {"prefill_chunk_size": 5},
}  # fmt: skip
"""Options of ``generate``, made anew for each call."""


def generated(model: Any, inputs: dict[str, Any], mode: str) -> Any:
    """Return tokens, or what else a mode gives, in a form that compares."""
    options = {"max_new_tokens": 7, "do_sample": False} | MODES[mode]()
    given = {k: v.clone() for k, v in inputs.items()}
    torch.manual_seed(3)
    found = model.generate(**given, **options)
    streamer = options.get("streamer")
    if streamer is not None:
        return found.tolist(), streamer.tokens
    if not isinstance(found, torch.Tensor):
        return found.sequences.tolist(), torch.stack(found.logits), torch.stack(found.scores)
    return found.tolist()


def same(one: Any, other: Any) -> bool:
    """Return whether two results are: tokens exactly, scores to rounding."""
    if isinstance(one, torch.Tensor):
        return torch.allclose(one, other, atol=1e-4, rtol=1e-4)
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return bool(one == other)
