"""Generation equals eager's greedy decoding token for token, within its budget, whatever the budget."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from gascompile.capture.export import capture
from gascompile.core.config import CACHE_VARIABLE
from gascompile.core.errors import (
    CheckpointError,
    InfeasiblePlanError,
    PlanMismatchError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.integrations.generation import Generator
from tests.greedy import eager_tokens
from tests.integrations.language_models import (
    NUM_NEW,
    PROMPT,
    SHALLOW,
    lively,
    open_generator,
    tiny_falcon,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_mixtral,
    tiny_qwen2_tied,
    weights_bytes,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of plans for all tests that do not look at it."""
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    model = lively(tiny_llama())
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def opened(llama: tuple[Path, Any], cache: Path) -> Iterator[Generator]:
    with open_generator(llama[0], "1GiB", cache) as made:
        yield made


@pytest.fixture
def generator(opened: Generator) -> Generator:
    opened.reset()
    return opened


@pytest.fixture(scope="module")
def smallest(llama: tuple[Path, Any], cache: Path) -> int:
    """Return the smallest budget in which a prompt is read, be it token by token."""
    return _smallest_budget(llama[0], cache, prefill_tokens=4)


def _smallest_budget(folder: Path, cache: Path, **options: Any) -> int:
    with pytest.raises(InfeasiblePlanError) as caught:
        open_generator(folder, 1, cache, **options)
    return caught.value.required_bytes


@pytest.mark.parametrize(
    ("make", "between"),
    [(tiny_llama, 1), (tiny_gpt2, 0), (tiny_mixtral, 0), (tiny_qwen2_tied, 0), (tiny_mistral, 0)],
)
def test_tokens_equal_eager_at_every_budget(
    make: Any, between: int, tmp_path: Path, cache: Path
) -> None:
    model = lively(make())
    model.save_pretrained(tmp_path)
    expected = eager_tokens(model, PROMPT, NUM_NEW)
    assert len(set(expected)) > 3, "the answer is too dull to tell a mistake"
    smallest = _smallest_budget(tmp_path, cache, prefill_tokens=1)
    largest = smallest + weights_bytes(model) + (2 << 20)
    streamed = []
    for budget in (largest, *[(smallest + largest) // 2] * between, smallest):
        # The prefill of the smallest budget shrinks to this in the end; see the test below.
        options = {"prefill_tokens": 1} if budget == smallest else {}
        with open_generator(tmp_path, budget, cache, **options) as generator:
            found = []
            for token in generator.stream(PROMPT, NUM_NEW):
                found.append(token)
                assert generator.last_run is not None
                assert generator.last_run.peak_bytes["cpu"] <= budget
            assert found == expected
            streamed.append(generator.last_runs["decode"].link_bytes.get("nvme->cpu", 0))
    assert streamed[0] == 0
    assert streamed == sorted(streamed)
    assert streamed[-1] > 0.8 * weights_bytes(model)


def test_prefill_shrinks_until_it_fits(llama: tuple[Path, Any], smallest: int, cache: Path) -> None:
    with open_generator(llama[0], smallest, cache, prefill_tokens=4) as generator:
        assert generator.prefill_tokens == 1
        assert list(generator.plans) == ["decode"]
        assert list(generator.stream(PROMPT, 3)) == eager_tokens(llama[1], PROMPT, 3)
    with open_generator(llama[0], smallest + 30_000, cache, prefill_tokens=32) as generator:
        assert 1 < generator.prefill_tokens < 32
        assert list(generator.stream(PROMPT, 3)) == eager_tokens(llama[1], PROMPT, 3)


def test_both_plans_share_arena_and_resident_weights(
    llama: tuple[Path, Any], smallest: int, cache: Path
) -> None:
    budget = smallest + 300_000
    with open_generator(llama[0], budget, cache) as generator:
        decode, prefill = generator.plans["decode"], generator.plans["prefill"]
    assert decode.arena_bytes == prefill.arena_bytes
    homes = [
        {n: (t.home, t.address) for n, t in p.tensors.items() if t.kind == "weight"}
        for p in (decode, prefill)
    ]
    assert homes[0] == homes[1]
    for plan in (decode, prefill):
        assert plan.peak_bytes["cpu"] <= budget
    caches = {
        name for name, tensor in decode.tensors.items() if name.startswith(("key_", "value_"))
    }
    assert len(caches) == 4
    assert all(plan.tensors[name].kind == "state" for plan in (decode, prefill) for name in caches)


def test_a_second_start_neither_captures_nor_plans(
    llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> list[int]:
        with open_generator(llama[0], 400_000, tmp_path) as generator:
            return list(generator.stream(PROMPT, 4))

    def never(*args: object, **kwargs: object) -> None:
        pytest.fail("the second start did the work again")

    first = start()
    monkeypatch.setattr("gascompile.capture.export.capture", never)
    monkeypatch.setattr("gascompile.passes.plan.make_plan.make_plan", never)
    assert start() == first


def test_another_budget_is_planned_of_the_kept_captures(
    llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []

    def seen(model: nn.Module, args: Any, kwargs: Any, **options: Any) -> Any:
        captured.append(kwargs["input_ids"].shape[1])
        return capture(model, args, kwargs, **options)

    def start(budget: int) -> list[int]:
        captured.clear()
        with open_generator(llama[0], budget, tmp_path) as generator:
            assert list(generator.stream(PROMPT, 4)) == eager_tokens(llama[1], PROMPT, 4)
        return captured

    monkeypatch.setattr("gascompile.capture.export.capture", seen)
    assert start(400_000) == [1, 8]
    assert start(600_000) == []
    monkeypatch.setattr(type(llama[1]), "forward", _opposite(type(llama[1]).forward))
    assert start(800_000) == [1, 8]


def test_models_of_other_classes_are_no_change_to_a_kept_capture(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    class Another(transformers.LlamaForCausalLM):
        """Of a class that the library has not seen yet: it notes each one in a table that its forwards look into."""

    with open_generator(llama[0], 400_000, tmp_path):
        pass
    with open_generator(llama[0], 600_000, tmp_path) as generator:
        tokens = list(generator.stream(PROMPT, 4))
        Another(llama[1].config)
        assert list(generator.stream(PROMPT, 4)) == tokens == eager_tokens(llama[1], PROMPT, 4)


def _opposite(forward: Any) -> Any:
    """Return a forward that picks the least probable token."""

    @functools.wraps(forward)
    def opposite(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        found.logits = -found.logits
        return found

    return opposite


def test_a_damaged_memo_is_planned_again(
    llama: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_generator(llama[0], "1GiB", tmp_path) as generator:
        first = list(generator.stream(PROMPT, 4))
    (memo,) = (tmp_path / "generation").iterdir()
    memo.write_text("{")
    with open_generator(llama[0], "1GiB", tmp_path) as generator:
        assert list(generator.stream(PROMPT, 4)) == first
    assert "cannot be used" in caplog.text


def test_all_that_is_kept_lies_in_the_cache_folder_and_no_kernels_are_made(
    llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    with open_generator(llama[1], 400_000, tmp_path / "here") as generator:
        assert list(generator.stream(PROMPT, 2)) == eager_tokens(llama[1], PROMPT, 2)
        assert generator._open is not None
        assert generator._open[0].spill_folder == tmp_path / "here" / "spill"
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "here" / "kernels").exists()


def test_a_longer_prompt_is_read_from_where_it_differs(
    generator: Generator, llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = eager_tokens(llama[1], PROMPT, NUM_NEW)
    read: list[tuple[int, int]] = []
    run = generator._run

    def watched(part: list[int], position: int) -> torch.Tensor:
        read.append((position, len(part)))
        return run(part, position)

    monkeypatch.setattr(generator, "_run", watched)
    answer = list(generator.stream(PROMPT, 4))
    assert read == [(0, 8), (8, 4), (12, 1), (13, 1), (14, 1)]
    read.clear()
    assert answer + list(generator.stream([*PROMPT.tolist(), *answer], 4)) == expected[:8]
    assert read[0] == (15, 1)
    read.clear()
    other = torch.cat([PROMPT[:3], torch.tensor([50, 51])])
    assert list(generator.stream(other, 3)) == eager_tokens(llama[1], other, 3)
    assert read[0] == (3, 2)


def test_streams_taken_in_turns_do_not_disturb_each_other(
    generator: Generator, llama: tuple[Path, Any]
) -> None:
    other = PROMPT.flip(0)
    pairs = list(zip(generator.stream(PROMPT, 5), generator.stream(other, 5), strict=True))
    assert [a for a, _ in pairs] == eager_tokens(llama[1], PROMPT, 5)
    assert [b for _, b in pairs] == eager_tokens(llama[1], other, 5)


def test_reset_and_close_leave_it_usable(generator: Generator) -> None:
    first = list(generator.stream(PROMPT, 3))
    generator.reset()
    assert not any(tensor.any() for tensor in generator._step.cache_tensors())
    assert list(generator.stream(PROMPT, 3)) == first
    generator.close()
    generator.close()
    assert list(generator.stream(PROMPT[None], 3)) == first


def test_an_end_token_is_yielded_and_ends(generator: Generator) -> None:
    whole = list(generator.stream(PROMPT, NUM_NEW))
    end = whole[3]
    first = whole.index(end)
    assert list(generator.stream(PROMPT, NUM_NEW, end)) == whole[: first + 1]
    assert list(generator.stream(PROMPT, NUM_NEW, [end, 999])) == whole[: first + 1]


def test_a_failed_read_is_forgotten(
    generator: Generator, llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = eager_tokens(llama[1], PROMPT, 4)
    stream = generator.stream(PROMPT, 4)
    found = [next(stream), next(stream)]

    def broken(part: list[int], position: int) -> torch.Tensor:
        raise StorageError("the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(generator, "_run", broken)
        with pytest.raises(StorageError, match="gone"):
            next(stream)
    assert found == expected[:2]
    assert list(generator.stream(PROMPT, 4)) == expected


def test_a_model_in_memory_is_spilled(llama: tuple[Path, Any], cache: Path) -> None:
    with open_generator(llama[1], 400_000, cache) as generator:
        assert list(generator.stream(PROMPT, 4)) == eager_tokens(llama[1], PROMPT, 4)


def test_constants_of_the_two_programs_are_kept_apart(tmp_path: Path, cache: Path) -> None:
    model = lively(tiny_falcon())
    model.save_pretrained(tmp_path)
    with open_generator(tmp_path, "1GiB", cache) as generator:
        assert list(generator.stream(PROMPT, 4)) == eager_tokens(model, PROMPT, 4)
        names = {
            name: {n for n in plan.tensors if "lifted_tensor" in n}
            for name, plan in generator.plans.items()
        }
    assert names["decode"]
    assert names["prefill"]
    assert not names["decode"] & names["prefill"]


@pytest.mark.parametrize(
    ("prompt", "num_new", "message"),
    [
        (PROMPT, 29, r"prompt of 12 tokens and 29 new ones are 41, more than max_length=40"),
        (torch.zeros(2, 4, dtype=torch.long), 1, "has 2 rows"),
        (torch.zeros(1, 1, 4, dtype=torch.long), 1, r"\[1, 1, 4\]"),
        (torch.zeros(4), 1, "float32"),
        ([7.9, 8.2], 1, "one sequence of whole numbers.*float"),
        ([[7, 8]], 1, "one sequence of whole numbers.*list"),
        ("ab", 1, "one sequence of whole numbers.*str"),
        ([], 1, "empty"),
        ([3, 101], 1, "token 101 at position 1"),
        ([3, -1], 1, "token -1"),
        ([3], 0, "max_new_tokens"),
    ],
)
def test_bad_calls_are_refused_at_once(
    generator: Generator, prompt: Any, num_new: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generator.stream(prompt, num_new)


def test_bad_models_are_refused(llama: tuple[Path, Any], tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="max_length=65 is more than the 64 positions"):
        open_generator(llama[0], "1GiB", cache, max_length=65)
    with pytest.raises(ValueError, match="at least 2"):
        open_generator(llama[0], "1GiB", cache, max_length=1)
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
    )
    with pytest.raises(CheckpointError, match="no causal language model"):
        open_generator(bert, "1GiB", cache)
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
    )
    with pytest.raises(UnsupportedOpError, match="keeps its past as"):
        open_generator(mamba, "1GiB", cache)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(UnsupportedOpError, match="encoder-decoder"):
        open_generator(t5, "1GiB", cache)
    llama[1].config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        open_generator(tmp_path, "1GiB", cache)


def test_tokens_under_autocast_are_refused(generator: Generator, llama: tuple[Path, Any]) -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(PlanMismatchError, match="autocast on cpu"),
    ):
        next(generator.stream(PROMPT, NUM_NEW))
    assert list(generator.stream(PROMPT, NUM_NEW)) == eager_tokens(llama[1], PROMPT, NUM_NEW)


def test_a_model_that_has_changed_is_refused(cache: Path) -> None:
    model = lively(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHALLOW)))
    head, rope, norm = model.lm_head.weight, model.model.rotary_emb, vars(model.model.norm)
    for change in (head.neg_, rope.inv_freq.neg_, lambda: norm.update(variance_epsilon=1.0)):
        with open_generator(model, "8MiB", cache) as generator, torch.no_grad():
            assert list(generator.stream(PROMPT, 4)) == eager_tokens(model, PROMPT, 4)
            change()
            with pytest.raises(PlanMismatchError, match="has changed since"):
                next(generator.stream(PROMPT, 4))
