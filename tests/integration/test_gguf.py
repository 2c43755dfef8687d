"""GGUF checkpoints against transformers' own loading of the same files, which decodes them as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import save_file, save_model

import gascompile
from gascompile.core.errors import CheckpointError, UnsupportedOpError
from gascompile.integrations.generation import Generator
from tests.gguf_files import write_gguf

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
}
LLAMA3: dict[str, Any] = {
    "rope_theta": 1e4,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CALL: dict[str, Any] = {"input_ids": (torch.arange(24) * 7 % 160).view(2, 12), "use_cache": False}


def made(kind: str = "llama", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind](**{**SIZES, "tie_word_embeddings": False, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def skeleton(config: Any) -> Any:
    with init_empty_weights(include_buffers=False):
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def expected(file: Path, **kwargs: Any) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **kwargs
    )
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**CALL).logits
    return logits


def tensor_bytes(file: Path) -> int:
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M has it."""
    return "q6_k" if name == "output.weight" or ".ffn_down." in name else "q4_k"


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("llama", lambda _: "q8_0"),
        ("llama", mixed),
        ("llama", lambda name: "float16" if ".attn_" in name else "q4_0"),
        ("llama", lambda _: "bfloat16"),
        ("mistral", lambda _: "float32"),
        ("qwen2", mixed),
        ("qwen3", lambda _: "q4_k"),
    ],
)
def test_results_are_those_of_transformers(
    kind: str, form: Callable[[str], str], cache: Path, tmp_path: Path
) -> None:
    model = made(kind)
    file = tmp_path / "model.gguf"
    write_gguf(model, file, form, architecture="llama" if kind == "mistral" else kind)
    wanted = expected(file)
    budget = "1MiB" if kind in {"llama", "mistral"} else "1.75MiB"
    with gascompile.compile(
        skeleton(model.config), budget, CALL, checkpoint=file, cache_dir=cache, fuse="off"
    ) as compiled:
        found = compiled(**CALL).logits
        report = compiled.last_run
        formats = compiled.format_report
        plan = compiled.plan
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert report is not None
    assert report.peak_bytes["cpu"] <= plan.budget_bytes["cpu"]
    # Each tensor goes over the link once, as many bytes as the file has of it; of the table some rows.
    total_bytes = tensor_bytes(file)
    assert sum(formats.size_bytes.values()) == total_bytes
    assert report.link_bytes["nvme->cpu"] <= total_bytes
    assert formats.relative_error == 0
    asked = {form(f"blk.0.{name}.weight") for name in ("attn_q", "ffn_down", "ffn_up")}
    assert {name for name in formats.size_bytes if name != "float32"} == asked - {"float32"}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_heads_are_as_wide_as_the_file_says(kind: str, cache: Path, tmp_path: Path) -> None:
    """Wider than the hidden size by heads, and other than transformers takes the family's to be."""
    file, model = tmp_path / "model.gguf", made(kind, head_dim=64)
    widths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    said = dict.fromkeys((f"{kind}.{key}" for key in widths), 64)
    write_gguf(model, file, lambda _: "float32", architecture=kind, more=said)
    with torch.no_grad(), gascompile.compile(file, "8MiB", CALL, cache_dir=cache) as compiled:
        assert compiled.config.head_dim == 64
        torch.testing.assert_close(compiled(**CALL).logits, model(**CALL).logits)


def test_a_file_is_a_model(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(made(), file, mixed)
    with gascompile.compile(file, "1MiB", CALL, cache_dir=cache) as compiled:
        found = compiled(**CALL).logits
        compiled.save(tmp_path / "bundle")
    torch.testing.assert_close(found, expected(file))
    with gascompile.load(tmp_path / "bundle", cache_dir=cache) as loaded:
        assert torch.equal(loaded(**CALL).logits, found)
    moved = tmp_path / "elsewhere" / "model.gguf"
    moved.parent.mkdir()
    file.rename(moved)
    for place in (moved, moved.parent):
        with gascompile.load(tmp_path / "bundle", checkpoint=place, cache_dir=cache) as loaded:
            assert torch.equal(loaded(**CALL).logits, found)
    # A folder that describes the model beside the file.
    config = made().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(moved.parent)
    plan = gascompile.plan(moved.parent, "8MiB", "cpu-nvme", cache_dir=cache)
    assert {t.forms.wire for t in plan.tensors.values() if t.forms} == {"q4_k", "q6_k"}


def test_one_table_for_words_and_logits(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(made("qwen2", tie_word_embeddings=True), file, mixed, architecture="qwen2")
    with gascompile.compile(file, "2MiB", CALL, cache_dir=cache, fuse="off") as compiled:
        torch.testing.assert_close(compiled(**CALL).logits, expected(file))
    assert "lacks 1 weights" in refusal(skeleton(made("qwen2").config), file, cache)


def test_text_of_any_length(cache: Path, tmp_path: Path) -> None:
    """The prompt's plan has a dynamic dimension, which the order of rows must not name."""
    file = tmp_path / "model.gguf"
    write_gguf(made(), file, mixed)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    prompt = CALL["input_ids"][:1, :5]
    wanted = model.eval().generate(prompt, max_new_tokens=4, do_sample=False)[0, 5:].tolist()
    with Generator(file, "8MiB", max_length=16, cache_dir=cache) as generator:
        assert list(generator.stream(prompt, max_new_tokens=4)) == wanted


def test_a_plan_for_rows_in_order_is_none_for_rows_in_pairs(cache: Path, tmp_path: Path) -> None:
    """The same weights, model and dtypes: a cached plan must not be taken from the one to the other."""
    model = made()
    plain, file = tmp_path / "model.safetensors", tmp_path / "model.gguf"
    save_model(model, str(plain))
    write_gguf(model, file, lambda _: "float32")
    with torch.no_grad():
        wanted = model(**CALL).logits
    for checkpoint in (plain, file, plain):
        with gascompile.compile(
            skeleton(model.config), "8MiB", CALL, checkpoint=checkpoint, cache_dir=cache, fuse="off"
        ) as compiled:
            torch.testing.assert_close(compiled(**CALL).logits, wanted)


def test_rows_in_pairs_may_be_converted(cache: Path, tmp_path: Path) -> None:
    """What is stored plain may be rounded when asked for, interleaved or not."""
    model = made()
    file = tmp_path / "model.gguf"
    write_gguf(model, file, lambda _: "float32")
    with torch.no_grad():
        wanted = model(**CALL).logits
    with gascompile.compile(
        skeleton(model.config),
        "8MiB",
        CALL,
        checkpoint=file,
        cache_dir=cache,
        fuse="off",
        weights="int8",
    ) as compiled:
        error = (compiled(**CALL).logits - wanted).norm() / wanted.norm()
    assert 1e-4 < error < 0.02


def test_bf16_models_round_what_is_decoded(cache: Path, tmp_path: Path) -> None:
    model = made()
    file = tmp_path / "model.gguf"
    write_gguf(model, file, lambda _: "q8_0")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    reference = reference.bfloat16().eval()
    narrow = skeleton(model.config).bfloat16()
    with pytest.raises(CheckpointError, match=r"has the dtype .*the model needs bfloat16"):
        gascompile.compile(narrow, "8MiB", CALL, checkpoint=file, cache_dir=cache, fuse="off")
    with torch.no_grad():
        wanted = reference(**CALL).logits.float()
    with gascompile.compile(
        narrow, "8MiB", CALL, checkpoint=file, cache_dir=cache, fuse="off", weights="bf16"
    ) as compiled:
        found = compiled(**CALL).logits.float()
        assert compiled.format_report.size_bytes.keys() == {"q8_0", "bfloat16"}
    assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_around_interleaved_rows(cache: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = made()
    file = tmp_path / "model.gguf"
    write_gguf(model, file, lambda _: "q8_0")
    lora = partial(LoraConfig, r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    whole = get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=file.name, dtype=torch.float32
        ),
        lora(),
    ).eval()
    with torch.no_grad():
        wanted = whole(**CALL).logits
    adapted = get_peft_model(skeleton(model.config), lora()).eval()
    values = {n: p for n, p in whole.named_parameters() if "lora" in n}
    adapted.load_state_dict(values, strict=False, assign=True)
    with gascompile.compile(
        adapted, "2MiB", CALL, checkpoint=file, cache_dir=cache, fuse="off"
    ) as compiled:
        torch.testing.assert_close(compiled(**CALL).logits, wanted)


def refusal(model: Any, file: Path, cache: Path, **kwargs: Any) -> str:
    with pytest.raises((CheckpointError, UnsupportedOpError)) as caught:
        gascompile.compile(
            model, "8MiB", CALL, checkpoint=file, cache_dir=cache, fuse="off", **kwargs
        )
    return str(caught.value)


def test_what_would_be_wrong_is_refused(cache: Path, tmp_path: Path) -> None:
    model = made()
    file = tmp_path / "model.gguf"

    def said(kind: str = "llama", more: dict[str, Any] | None = None, **settings: Any) -> str:
        write_gguf(model, file, lambda _: "q8_0", more=more)
        return refusal(skeleton(made(kind, **settings).config), file, cache)

    assert "llama.attention.head_count = 8" in said(num_attention_heads=4)
    assert "rms_norm_eps" in said(rms_norm_eps=1e-4)
    theta = {"rope_theta": 5e5, "rope_type": "default"}
    assert "rope_theta" in said(rope_parameters=theta)
    assert "the model is a qwen2" in said("qwen2")
    assert "linear" in said(more={"llama.rope.scaling.type": "linear"})
    assert "llama.logit_scale = 2.0" in said(more={"llama.logit_scale": 2.0})
    assert "mixtures of experts" in said(more={"llama.expert_count": 8})
    assert "'gemma'" in said(more={"general.architecture": "gemma"})
    scaled = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    assert "scaled" in said(rope_parameters=scaled)
    assert "other frequencies" in said(rope_parameters=LLAMA3)
    other = skeleton(made(attention_bias=True).config)
    write_gguf(made(attention_bias=True), file, lambda _: "q8_0")
    assert "biases of queries" in refusal(other, file, cache)
    write_gguf(model, file, lambda _: "q8_0")
    assert "leave weights= out" in refusal(skeleton(model.config), file, cache, weights="int4")
    assert "models of transformers alone" in refusal(torch.nn.Linear(2, 2), file, cache)
    tied = skeleton(made().config)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    assert "'output.weight'" in refusal(tied, file, cache)


def test_frequencies_of_the_file_are_compared(cache: Path, tmp_path: Path) -> None:
    """What a converter writes for a scaled model is read with that model, and with no other."""
    model = made(rope_parameters=LLAMA3)
    plain = made()
    inverse = model.model.rotary_emb.inv_freq
    file = tmp_path / "model.gguf"
    factors = plain.model.rotary_emb.inv_freq / inverse
    assert float(factors.max()) > 2
    write_gguf(model, file, lambda _: "q8_0", tensors={"rope_freqs.weight": factors})
    with gascompile.compile(
        skeleton(model.config), "8MiB", CALL, checkpoint=file, cache_dir=cache, fuse="off"
    ) as compiled:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        model.load_state_dict(loaded.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(compiled(**CALL).logits, model(**CALL).logits)
    assert "other frequencies" in refusal(skeleton(plain.config), file, cache)


def test_training_and_other_formats_are_refused_with_advice(cache: Path, tmp_path: Path) -> None:
    model = made()
    file = tmp_path / "model.gguf"
    write_gguf(model, file, lambda _: "q8_0")
    meta = skeleton(model.config)
    optimizer = torch.optim.SGD(meta.parameters(), lr=0.1)
    with pytest.raises(UnsupportedOpError, match="cannot be trained: freeze the base"):
        gascompile.compile_step(
            meta, lambda m, _: m(**CALL).logits.mean(), optimizer, "64MiB", checkpoint=file
        )
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"\0" + file.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="does not begin as one"):
        gascompile.plan(damaged, "8MiB", "cpu-nvme", cache_dir=cache)
    odd = tmp_path / "odd.safetensors"
    quantised = {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(2, 2, dtype=torch.int32)}
    save_file({**dict(model.state_dict()), **quantised}, odd)
    assert "use a GGUF file" in refusal(meta, odd, cache)
    folder = tmp_path / "gptq"
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 3}}
    transformers.LlamaConfig(**config).save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"bits is 3, .*GGUF"):
        gascompile.plan(folder, "8MiB", "cpu-nvme", cache_dir=cache)
