"""``gascompile generate``: the text of transformers' own loop, and errors that say what to give."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from examples.demo_model import make_demo
from tests.commands.command_line import failure, json_of, ok, run

_PLACE = ("--budget", "2MiB", "-m", "cpu-nvme")
_PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model of 1.5 MiB and more with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("demo")
    make_demo(folder, width=128, num_layers=2)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return "--cache-dir", str(tmp_path_factory.mktemp("cache"))


def eager(demo: Path, ids: torch.Tensor, **options: Any) -> list[int]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(demo).eval()
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=6, **options)
    return [int(token) for token in found[0, ids.shape[1] :]]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ((), {"do_sample": False}),
        (("--beams", "2"), {"do_sample": False, "num_beams": 2}),
        (
            ("--sample", "--temperature", "0.8", "--top-k", "7", "--seed", "5"),
            {"do_sample": True, "temperature": 0.8, "top_k": 7},
        ),
    ],
)
def test_text_is_transformers_own(
    demo: Path, cache: tuple[str, str], flags: tuple[str, ...], options: dict[str, Any]
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    ids = torch.tensor([tokenizer(_PROMPT)["input_ids"]])
    torch.manual_seed(5)
    wanted = eager(demo, ids, **options)
    call = ("generate", str(demo), "--prompt", _PROMPT, "-n", "6", *_PLACE, *cache, *flags)
    data = json_of(*call)
    assert data["tokens"] == wanted
    assert data["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
    assert (data["prompt_tokens"], data["new_tokens"]) == (ids.shape[1], 6)
    assert 0 < data["peak_bytes"]["cpu"] <= data["budget_bytes"]["cpu"]
    assert data["text"].strip() in ok(*call)


def test_tokens_stand_for_a_prompt_where_there_is_no_tokenizer(
    demo: Path, cache: tuple[str, str], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(demo, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    data = json_of("generate", str(bare), "--prompt-ids", "5, 6,7", "-n", "6", *_PLACE, *cache)
    assert data["tokens"] == eager(demo, torch.tensor([[5, 6, 7]]), do_sample=False)
    assert data["bytes_per_token"] > 0
    code, said = failure("generate", str(bare), "--prompt", "x", *_PLACE, *cache)
    assert code == 1
    assert "--prompt-ids" in said


def test_what_cannot_be_generated_says_what_to_give(demo: Path, cache: tuple[str, str]) -> None:
    def said(*args: str) -> str:
        code, out, err = run("generate", *args, *_PLACE, *cache)
        assert code in (1, 2)
        assert not out
        return " ".join(err.split())

    assert "either --prompt TEXT or --prompt-ids" in said(str(demo))
    assert "chat template" in said(str(demo), "--prompt", "x", "--chat")
    assert "no tokens" in said(str(demo), "--prompt", "")
    assert "numbers apart by commas" in said(str(demo), "--prompt-ids", "1,x")
    assert "numbers of tokens" in said(str(demo), "--prompt-ids", "99999999999999999999")
    assert "no text in UTF-8" in said(str(demo), "--prompt", "a\udcff")
    assert "--sample" in said(str(demo), "--prompt", "x", "--top-k", "4")
    assert "seed" in said(str(demo), "--prompt", "x", "--sample", "--seed", str(1 << 64))
    assert "the prompt has tokens" in said(str(demo), "--prompt-ids", "1000000")
    assert "is no directory" in said(str(demo / "nothing"), "--prompt", "x")
