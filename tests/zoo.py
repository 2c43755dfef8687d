"""Small random-weight models of many architectures, with inputs, for tests that compare with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from gascompile.integrations.huggingface import register_pytrees

Case = tuple[nn.Module, dict[str, Any]]

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(5, 90, shape)


def llama() -> Case:
    config = transformers.LlamaConfig(**_TEXT, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), {"input_ids": _tokens(2, 8)}


def gpt2() -> Case:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64)
    return transformers.GPT2LMHeadModel(config), {"input_ids": _tokens(2, 8)}


def bert() -> Case:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = {"input_ids": _tokens(2, 8), "attention_mask": mask}
    return transformers.BertModel(transformers.BertConfig(**_TEXT)), inputs


def vit() -> Case:
    config = transformers.ViTConfig(**_VISION)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 32, 32)
    }


def clip() -> Case:
    config = transformers.CLIPConfig(
        text_config={**_TEXT, "eos_token_id": 99, "bos_token_id": 98},
        vision_config=_VISION,
        projection_dim=32,
    )
    inputs = {"input_ids": _tokens(2, 8), "pixel_values": torch.randn(2, 3, 32, 32)}
    return transformers.CLIPModel(config), inputs


def whisper() -> Case:
    config = transformers.WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=100,
        max_source_positions=50,
        max_target_positions=32,
        num_mel_bins=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": _tokens(2, 6)}
    return transformers.WhisperForConditionalGeneration(config), inputs


def t5() -> Case:
    config = transformers.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=100,
    )
    inputs = {"input_ids": _tokens(2, 8), "decoder_input_ids": _tokens(2, 6)}
    return transformers.T5ForConditionalGeneration(config), inputs


def mixtral() -> Case:
    config = transformers.MixtralConfig(**_TEXT, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config), {"input_ids": _tokens(2, 8)}


def gemma3() -> Case:
    config = transformers.Gemma3TextConfig(
        **_TEXT, num_key_value_heads=2, head_dim=16, sliding_window=4
    )
    inputs = {"input_ids": _tokens(2, 8), "output_hidden_states": True}
    return transformers.Gemma3ForCausalLM(config), inputs


def deepseek_v3() -> Case:
    config = transformers.DeepseekV3Config(
        **_TEXT,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
    )
    return transformers.DeepseekV3ForCausalLM(config), {"input_ids": _tokens(2, 8)}


def mamba2() -> Case:
    config = transformers.Mamba2Config(
        hidden_size=64,
        num_hidden_layers=1,
        vocab_size=100,
        state_size=8,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        chunk_size=4,
    )
    inputs = {"input_ids": _tokens(2, 8), "use_cache": False}
    return transformers.Mamba2ForCausalLM(config), inputs


def deberta() -> Case:
    config = transformers.DebertaV2Config(
        **_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16
    )
    inputs = {"input_ids": _tokens(2, 8), "labels": _tokens(2, 8)}
    return transformers.DebertaV2ForMaskedLM(config), inputs


def clipseg() -> Case:
    config = transformers.CLIPSegConfig(
        text_config={**_TEXT, "eos_token_id": 99, "bos_token_id": 98},
        vision_config=_VISION,
        projection_dim=32,
        extract_layers=[0, 1],
        reduce_dim=16,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    inputs = {"input_ids": _tokens(2, 8), "pixel_values": torch.randn(2, 3, 32, 32)}
    return transformers.CLIPSegForImageSegmentation(config), inputs


def hubert() -> Case:
    config = transformers.HubertConfig(
        **_TEXT,
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    return transformers.HubertModel(config), {"input_values": torch.randn(2, 800)}


class Modules(nn.Module):
    """Layers of torch itself whose kernels allocate more than their results."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 64, padding_idx=0)
        self.lstm = nn.LSTM(64, 64, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(128, 128, batch_first=True)
        self.up = nn.ConvTranspose1d(128, 16, 4, 2)
        self.volume = nn.Conv3d(2, 4, 3)
        self.norm = nn.InstanceNorm1d(16, affine=True)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.bags(ids.reshape(-1, 4)).reshape(2, -1, 64)
        x = self.gru(self.lstm(x)[0])[0]
        x = self.norm(self.up(x.transpose(1, 2)))
        return functional.interpolate(x, scale_factor=2, mode="linear"), self.volume(
            x[:, :, :12].reshape(1, 2, 4, 6, 8)
        )


def modules() -> Case:
    return Modules(), {"ids": torch.randint(0, 50, (2, 24))}


def reduced() -> Case:
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64))
    return model.to(torch.bfloat16), {"input": torch.randn(3, 64, dtype=torch.bfloat16)}


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, pooling and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.norm2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.first(image)))
        x = x + functional.relu(self.norm2(self.second(x)))
        pooled: torch.Tensor = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return functional.linear(pooled, self.head.weight, self.head.bias)


def convnet() -> Case:
    model = ConvNet()
    model(torch.randn(8, 3, 16, 16))  # gives the running statistics values of their own
    return model, {"image": torch.randn(2, 3, 16, 16)}


class TiedNet(nn.Module):
    """One weight under two names, one used several times, one returned, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.block = nn.Linear(32, 32)
        self.other = nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, ids: torch.Tensor, *, shift: float = 0.5) -> dict[str, Any]:
        x = self.embed(ids) * self.scale
        for _ in range(3):
            x = torch.tanh(self.block(x)) + self.other.weight.t().mean() * shift
        x = self.other(x)
        return {"logits": self.head(x), "parts": (x, [self.scale, ids]), "nothing": None}


def tied() -> Case:
    return TiedNet(), {"ids": torch.randint(0, 50, (2, 7)), "shift": 0.25}


CASES: dict[str, Callable[[], Case]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "clip": clip,
    "whisper": whisper,
    "t5": t5,
    "mixtral": mixtral,
    "convnet": convnet,
    "tied": tied,
    "gemma3": gemma3,
    "deepseek_v3": deepseek_v3,
    "mamba2": mamba2,
    "deberta": deberta,
    "clipseg": clipseg,
    "hubert": hubert,
    "modules": modules,
    "reduced": reduced,
}


def make(name: str) -> Case:
    """Return a case in eval mode, the same at every call."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    return model.eval(), inputs


def eager(model: nn.Module, inputs: Mapping[str, Any]) -> list[Any]:
    """Return the values that a model's output is made of."""
    register_pytrees()
    with torch.no_grad():
        return pytree.tree_leaves(model(**inputs))


def assert_same(outputs: Any, expected: list[Any]) -> None:
    """Assert that an output is made of values that are equal but for rounding."""
    found = pytree.tree_leaves(outputs)
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5)
        else:
            assert value == wanted
