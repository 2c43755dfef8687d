"""Compiled models where libraries take a model: the rows of docs/drop-in.md, with tiny random weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import gascompile

_ROOT = Path(__file__).parents[2]
_WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat dog sat on a mat was good bad film where in paris he lives"
Compile = Callable[..., Any]


@pytest.fixture
def compiled(tmp_path: Path) -> Compile:
    def compile_it(model: torch.nn.Module, **options: Any) -> Any:
        return gascompile.compile(
            model, "8MiB", machine="cpu-nvme", cache_dir=tmp_path / "cache", **options
        )

    return compile_it


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(_WORDS.split()))
    kind: Any = transformers
    return kind.BertTokenizerFast(str(file))


@pytest.fixture
def config() -> transformers.BertConfig:
    torch.manual_seed(0)
    return transformers.BertConfig(
        vocab_size=len(_WORDS.split()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, dtype="float32",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "kind", "text"),
    [
        ("text-classification", "BertForSequenceClassification", "the film was good"),
        ("token-classification", "BertForTokenClassification", "he lives in paris"),
        ("fill-mask", "BertForMaskedLM", "the [MASK] sat on the mat"),
        ("feature-extraction", "BertModel", "the cat sat"),
    ],
)
def test_pipeline_of_transformers(
    task: Any, kind: str, text: str, compiled: Compile, config: Any, tokenizer: Any
) -> None:
    model = getattr(transformers, kind)(config).eval()
    wanted = transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")(text)
    it = compiled(model)
    found = transformers.pipeline(task, model=it, tokenizer=tokenizer, device="cpu")(text)
    assert str(found) == str(wanted)
    assert it.last_run is not None


def test_generate_of_transformers(compiled: Compile) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=None, pad_token_id=0, dtype="float32",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(1, 6).reshape(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 3, "use_cache": False}
    wanted = model.generate(ids, do_sample=False, **options)
    it = compiled(model)
    assert torch.equal(it.generate(ids, do_sample=False, **options), wanted)
    torch.manual_seed(1)
    wanted = model.generate(ids, do_sample=True, **options)
    torch.manual_seed(1)
    assert torch.equal(it.generate(ids, do_sample=True, **options), wanted)
    assert len(it._gascompile.units) == 1


def test_encode_of_sentence_transformers(
    compiled: Compile, config: Any, tokenizer: Any, tmp_path: Path
) -> None:
    library: Any = import_module("sentence_transformers")
    modules: Any = import_module("sentence_transformers.sentence_transformer.modules")
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    encoder = modules.Transformer(str(tmp_path / "bert"))
    pooling = modules.Pooling(encoder.get_embedding_dimension())
    model = library.SentenceTransformer(modules=[encoder, pooling], device="cpu")
    words = _WORDS.split()[5:]
    texts = [" ".join(words[i : i + 1 + i % 7]) for i in range(12)]
    wanted = model.encode(texts, batch_size=4)
    encoder.model = it = compiled(encoder.model)
    found = model.encode(texts, batch_size=4)
    assert abs(found - wanted).max() <= 1e-5
    assert model.device == it.device
    assert len(it._gascompile.units) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_pipeline_of_diffusers(compiled: Compile) -> None:
    diffusers: Any = import_module("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(4, 4), norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    ).eval()  # fmt: skip
    pipe = diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def image() -> Any:
        generator = torch.Generator().manual_seed(0)
        return pipe(num_inference_steps=2, output_type="np", generator=generator).images

    wanted = image()
    pipe.unet = it = compiled(unet)
    assert abs(pipe.to("cpu") and image() - wanted).max() <= 1e-4
    assert it.config.sample_size == 8
    with pytest.raises(gascompile.CompiledModelError, match="float16"):
        pipe.to(torch.float16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_vae_of_diffusers(compiled: Compile) -> None:
    diffusers: Any = import_module("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,), layers_per_block=1, latent_channels=4, norm_num_groups=2
    ).eval()
    latents = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        wanted = vae.decode(latents).sample
        # Pipelines call a method of the whole: what is compiled is the part that it calls.
        vae.decoder = it = compiled(vae.decoder)
        torch.testing.assert_close(vae.decode(latents).sample, wanted)
    assert it.last_run is not None


def test_the_table_of_the_docs() -> None:
    """Each row names a test of this file or of another, and the version that is installed here."""
    page = (_ROOT / "docs" / "drop-in.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (\S+) (\S+) \| `(\S+)::(\S+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 8
    for library, stated, file, test in rows:
        assert version(library).partition("+")[0] == stated, library
        assert f"def {test}(" in (_ROOT / "tests" / file).read_text(encoding="utf-8"), test
