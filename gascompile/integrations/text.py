"""Text: a prompt read by a model's own tokenizer, tokens shown as they come, and what their runs measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gascompile.core.errors import CheckpointError

_UNFINISHED = "\ufffd"
"""Stands at the end of a text whose last character has more bytes to come."""


def tokenizer_of(folder: str | Path) -> Any:
    """Return the tokenizer of a model's directory.

    Raises:
        CheckpointError: it has none, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read; add its tokenizer files (tokenizer.json, "
            "tokenizer_config.json), or give tokens by --prompt-ids 1,2,3"
        ) from error


def prompt_tokens(tokenizer: Any, text: str, *, chat: bool) -> torch.Tensor:
    """Return a prompt as one row of tokens.

    Args:
        tokenizer: of transformers.
        text: the prompt.
        chat: whether it is a user's turn, to be put into the model's chat template.

    Raises:
        CheckpointError: the model has no chat template.
        ValueError: the prompt has no tokens, or is no text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is no text in UTF-8: {error}") from error
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise CheckpointError("the model has no chat template; leave out --chat")
        turn = [{"role": "user", "content": text}]
        tokens = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    else:
        tokens = tokenizer(text)["input_ids"]
    if not tokens:
        raise ValueError(
            "the prompt has no tokens; write a longer one, or look whether the folder has a tokenizer"
        )
    return torch.tensor([tokens])


@dataclass(slots=True)
class TextWatch:
    """A streamer of transformers that shows each token and keeps what its run measured."""

    last_run: Callable[[], Any]
    """Returns the report of the last call."""
    show: Callable[[str], None]
    decode: Callable[[Sequence[int]], str]
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    link_bytes: list[int] = field(default_factory=list)
    """Of each token after the first."""
    _shown: int = 0
    _begun_s: float | None = None

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then each token."""
        now_s = time.perf_counter()
        if self._begun_s is None:
            self._begun_s = now_s
            return
        self.times_s.append(now_s - self._begun_s)
        report = self.last_run()
        for tier, size in report.peak_bytes.items():
            self.peak_bytes[tier] = max(size, self.peak_bytes.get(tier, 0))
        if self.tokens:
            self.link_bytes.append(sum(report.link_bytes.values()))
        self.tokens += value.flatten().tolist()
        text = self.decode(self.tokens)
        if not text.endswith(_UNFINISHED):
            self._say(text)

    def end(self) -> None:
        """Show what is left."""
        self._say(self.decode(self.tokens))

    def _say(self, text: str) -> None:
        self.show(text[self._shown :])
        self._shown = len(text)

    def figures(self) -> dict[str, Any]:
        """Return what was measured, in seconds and bytes; ``None`` where one token says nothing."""
        count = len(self.tokens)
        rest_s = self.times_s[-1] - self.times_s[0] if count > 1 else 0.0
        return {
            "new_tokens": count,
            "first_token_s": self.times_s[0] if self.times_s else None,
            "tokens_per_s": (count - 1) / rest_s if rest_s else None,
            "bytes_per_token": sorted(self.link_bytes)[len(self.link_bytes) // 2]
            if self.link_bytes
            else None,
            "peak_bytes": self.peak_bytes,
        }
