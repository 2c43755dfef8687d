"""Text generation within a budget: greedy decoding of any causal language model of transformers.

Two plans, one for the prompt and one for each further token, share the weights, the arena and the
key/value cache. A prompt is read in pieces of at most ``prefill_tokens`` tokens, so that its length
costs time but no memory; pieces are as long as they are, without padding, so nothing is approximate.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch

from gascompile.api.compile import make_job
from gascompile.api.guards import Values
from gascompile.api.matching import advice, settings_misfit
from gascompile.api.sources import open_source
from gascompile.api.unit import Unit
from gascompile.capture.outlines import ModelOutlines
from gascompile.codegen.allocator_library import allocation_counter
from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig, folder_of
from gascompile.core.errors import (
    BudgetExceededError,
    CheckpointError,
    PlanMismatchError,
    UnsupportedOpError,
)
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport
from gascompile.core.sources import FileStamp
from gascompile.core.waiting import Turn
from gascompile.integrations.generation_plans import Units, plan_generation
from gascompile.machines.op_memory import remember
from gascompile.machines.run_within_budget import MOST_PLANS
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session

_log = logging.getLogger("gascompile")

DEFAULT_MAX_LENGTH = 1024  # tokens: a cache takes memory for each
DEFAULT_PREFILL_TOKENS = 128  # as many as ``plan`` makes up inputs of


class Generator:
    """A causal language model that generates text within its budget, one sequence at a time.

    The key/value cache holds the sequence of the latest call: a prompt that starts with the same tokens
    is only read from where it differs. Several streams may be consumed in turns; each finds its place
    again. Close it, or use ``with``, to free its memory early.
    """

    def __init__(
        self,
        path_or_model: str | os.PathLike[str] | torch.nn.Module,
        budget: Budget | int | str | None = None,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        prefill_tokens: int = DEFAULT_PREFILL_TOKENS,
        cache_dir: str | os.PathLike[str] | None = None,
        machine: Machine | str | os.PathLike[str] | None = None,
        time_limit_s: float = 20.0,
        on_exceed: str = "error",
    ) -> None:
        """Plan the model, or find its plans in the cache, and start to load the weights that stay.

        Args:
            path_or_model: a Hugging Face directory, or a causal language model of transformers; on the
                meta device when ``checkpoint`` is given.
            budget: memory for weights, cache and activations in the tier that computes.
            checkpoint: weights of a model given as a module; read in place.
            max_length: tokens of prompt and answer together, which sizes the cache. By default what the
                model was made for, at most 1024.
            prefill_tokens: most tokens of the prompt to read at once. More is faster and needs more
                memory; it shrinks by itself where the budget is small.
            cache_dir: where plans, the machine profile and spilled weights are kept, and activations that move.
            machine: ``None`` for this machine, measured once and remembered.
            time_limit_s: wall clock for the solver, per plan.
            on_exceed: where an op asks for more than the budget has, ``"error"`` plans again or stops, ``"warn"``
                goes on.

        Raises:
            CheckpointError: the directory holds no causal language model, or no weights that fit it.
            InfeasiblePlanError: the budget is too small; names the smallest feasible one.
            UnsupportedOpError: the model keeps another kind of past than keys and values.
        """
        from gascompile.integrations.decoding_step import DecodingStep

        lm, weights = _open(path_or_model, checkpoint)
        self.max_length = _checked_max_length(lm, max_length)
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, not {prefill_tokens}")
        self._vocabulary = int(lm.get_input_embeddings().num_embeddings)
        self.eos_token_ids = _eos_token_ids(lm)
        self._step = DecodingStep(lm, self.max_length).eval()
        self._cache_dir = folder_of(cache_dir, budget)
        # Ops run one by one here, so kernels would be compiled for nothing.
        config = CompileConfig(
            time_limit_s=time_limit_s, cache_dir=self._cache_dir, fuse="off", on_exceed=on_exceed
        )
        self._job = make_job(
            self._step,
            budget,
            checkpoint=weights,
            dynamic_shapes=None,
            machine=machine,
            config=config,
        )
        self._most_tokens = min(prefill_tokens, self.max_length - 1)
        self._units = self._planned()
        self._held: list[int] = []
        self._turn = Turn()
        self._open: tuple[Session, dict[str, Executor]] | None = None
        self.last_runs: dict[str, RunReport] = {}
        self.last_run: RunReport | None = None
        self._open_session()

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plans by name, ``decode`` and ``prefill``; the latter is missing where the budget is too small."""
        return {name: unit.bundle.plan for name, unit in _named(self._units).items()}

    @property
    def prefill_tokens(self) -> int:
        """Most tokens of a prompt that are read at once."""
        return self._units.prefill_tokens

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key/value cache, which are part of the budget."""
        return self._step.cache_bytes

    def stream(
        self,
        input_ids: torch.Tensor | Sequence[int],
        max_new_tokens: int,
        eos_token_id: int | Collection[int] | None = None,
    ) -> Iterator[int]:
        """Yield the most probable next token, again and again.

        Args:
            input_ids: the prompt: token numbers, or a tensor ``[n]`` or ``[1, n]``.
            max_new_tokens: tokens to yield at most.
            eos_token_id: token or tokens that end the answer; they are yielded too. ``None`` ends it at
                ``max_new_tokens`` only; ``eos_token_ids`` is what the model declares.

        Raises:
            ValueError: an argument is out of range.
            PlanMismatchError: autocast is on, or off, where it was not when the plans were made, or the model has
                changed since.
            StorageError: a weight cannot be read; the generator stays usable.
        """
        tokens = self._checked_prompt(input_ids)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        if len(tokens) + max_new_tokens > self.max_length:
            raise ValueError(
                f"the prompt of {len(tokens)} tokens and {max_new_tokens} new ones are "
                f"{len(tokens) + max_new_tokens}, more than max_length={self.max_length}; pass a larger max_length to "
                "Generator, a shorter prompt or fewer new tokens"
            )
        ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
        return self._stream(tokens, max_new_tokens, ends)

    def reset(self) -> None:
        """Forget the sequence; the next prompt is read from its first token."""
        self._turn.take(self._forget)

    def _forget(self) -> None:
        self._held.clear()
        # On a device that has copies of them, the next call takes this over.
        for tensor in self._step.cache_tensors():
            tensor.zero_()

    def close(self) -> None:
        """Free the arena and close the weight files; the next token opens them again."""
        self._turn.take(self._close)

    def _close(self) -> None:
        if self._open is not None:
            self._open[0].close()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self._step.lm).__name__
        return f"Generator({name}, max_length={self.max_length}, {' + '.join(self.plans)})"

    def _stream(self, tokens: list[int], max_new_tokens: int, ends: set[int]) -> Iterator[int]:
        for _ in range(max_new_tokens):
            token = int(self._logits(tokens).argmax())
            tokens.append(token)
            yield token
            if token in ends:
                return

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        """Bring the cache to ``tokens`` and return the logits of what comes next."""
        return self._turn.take(partial(self._read, tokens))

    def _read(self, tokens: list[int]) -> torch.Tensor:
        self._open_session()
        position, num_plans = _common_length(self._held, tokens[:-1]), 0
        del self._held[position:]
        while position < len(tokens):
            part = tokens[position : position + self._units.prefill_tokens]
            try:
                logits = self._run(part, position)
            except BudgetExceededError as error:
                num_plans += 1
                self._plan_again(part, error, is_last=num_plans > MOST_PLANS)
                continue
            self._held += part
            position += len(part)
        return logits

    def _run(self, part: list[int], position: int) -> torch.Tensor:
        name = "decode" if len(part) == 1 else "prefill"
        assert self._open is not None
        executor = self._open[1][name]
        if (why_not := settings_misfit(self._units.decode.bundle.plan)) is not None:
            raise PlanMismatchError(f"{why_not.reason}. {advice(why_not)}")
        if (changed := self._changed(name)) is not None:
            raise PlanMismatchError(
                f"{changed}: the model has changed since the plans were made. Make another Generator, or call generate "
                "of what gascompile.compile returns, which plans again"
            )
        logits: torch.Tensor
        (logits,) = executor.run(torch.tensor([part]), torch.tensor(position))
        assert executor.last_run is not None
        self.last_run = self.last_runs[name] = executor.last_run
        return logits[0]

    def _changed(self, name: str) -> str | None:
        """Return what of the model a plan was made with and is another now, in words."""
        unit = _named(self._units)[name]
        changed = unit.basis.changed() if unit.basis is not None else None
        changed = changed or self._values.changed() or self._outlines.changed()
        return changed or (unit.buffers.changed() if unit.buffers is not None else None)

    def _planned(self, *, again: bool = False) -> Units:
        """Return the plans, and take note of the values of now."""
        self._values, buffers = (Values.of(self._step, of) for of in ("_parameters", "_buffers"))
        self._outlines = ModelOutlines(self._step)
        units = plan_generation(self._job, self._most_tokens, again=again)
        caches = {id(tensor) for tensor in self._step.cache_tensors()}
        for unit in _named(units).values():
            # What is in the cache was computed with those that stay in memory, too.
            program, held = unit.bundle.program, unit.bundle.held
            unit.buffers = buffers.read(program.bound, [n for n in held if id(held[n]) in caches])
        return units

    def _plan_again(self, part: list[int], error: BudgetExceededError, *, is_last: bool) -> None:
        """Plan with what an op was found to take. What the stopped run has written is written again."""
        bundle = _named(self._units)["decode" if len(part) == 1 else "prefill"].bundle
        remember(bundle.program, bundle.plan, error, self._cache_dir)
        if is_last:
            raise error
        _log.warning(
            "op '%s' asks for %d bytes, planned were %d: the plans are made again",
            error.op,
            error.real_bytes,
            error.planned_bytes,
        )
        self._close()
        self._units = self._planned(again=True)
        self._open_session()

    def _open_session(self) -> None:
        """Have an open session, and one of this process: a child of a fork opens its own."""
        if self._open is not None and self._open[0].is_open:
            return
        self._close()
        units = _named(self._units)
        bundles = [unit.bundle for unit in units.values()]
        stamps: dict[str, FileStamp] = {s.path: s for b in bundles for s in b.weights.stamps}
        session = Session.for_plan(
            self._units.decode.bundle.plan,
            sources={name: s for b in bundles for name, s in b.weights.sources.items()},
            stamps=tuple(stamps.values()),
            states={name: tensor for b in bundles for name, tensor in b.held.items()},
            spill_folder=self._cache_dir / "spill",
        )
        executors = {
            name: Executor(
                session,
                unit.graph_module,
                unit.bundle.plan,
                counter=allocation_counter(self._cache_dir),
                on_exceed=self._job.config.on_exceed,
            )
            for name, unit in units.items()
        }
        # At once: who is interrupted before has opened nothing.
        self._open = (session, executors)

    def _checked_prompt(self, input_ids: torch.Tensor | Sequence[int]) -> list[int]:
        if isinstance(input_ids, torch.Tensor):
            if input_ids.dim() == 2 and input_ids.shape[0] != 1:
                raise ValueError(
                    f"one sequence at a time: input_ids has {input_ids.shape[0]} rows; call stream once per row"
                )
            if input_ids.dim() not in {1, 2} or input_ids.is_floating_point():
                raise ValueError(
                    f"input_ids is a tensor of whole numbers [n] or [1, n], not {input_ids.dtype} "
                    f"{list(input_ids.shape)}"
                )
            input_ids = input_ids.flatten().tolist()
        try:
            tokens = [operator.index(token) for token in input_ids]
        except TypeError as error:
            raise ValueError(f"input_ids is one sequence of whole numbers: {error}") from None
        if not tokens:
            raise ValueError("the prompt is empty: pass at least one token")
        for i, token in enumerate(tokens):
            if not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"token {token} at position {i} is outside of the vocabulary of {self._vocabulary} tokens"
                )
        return tokens


def _named(units: Units) -> dict[str, Unit]:
    both = {"prefill": units.prefill, "decode": units.decode}
    return {name: unit for name, unit in both.items() if unit is not None}


def _open(
    path_or_model: str | os.PathLike[str] | torch.nn.Module,
    checkpoint: str | os.PathLike[str] | None,
) -> tuple[Any, str | os.PathLike[str] | None]:
    """Return the model and the place of its weights."""
    if isinstance(path_or_model, torch.nn.Module):
        lm: Any = path_or_model
        name, weights = type(lm).__name__, checkpoint
    else:
        source = open_source(path_or_model, tokens=1)
        lm, name = source.model, f"{os.fspath(path_or_model)} ({type(source.model).__name__})"
        weights = checkpoint if checkpoint is not None else source.checkpoint
        if weights is None:
            raise CheckpointError(
                f"{name} holds no .safetensors file and no pytorch_model.bin; add the weights or pass checkpoint="
            )
    if not hasattr(lm, "can_generate") or not lm.can_generate():
        raise CheckpointError(
            f"{name} is no causal language model of transformers; pass one with a language model head, such as "
            "LlamaForCausalLM"
        )
    if lm.config.is_encoder_decoder:
        raise UnsupportedOpError(
            f"{name} is an encoder-decoder model; generation supports decoders only. Compile its encoder and "
            "decoder as modules instead"
        )
    return lm, weights


def _checked_max_length(lm: Any, max_length: int | None) -> int:
    positions = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    if max_length is None:
        return min(positions or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)
    if max_length < 2:
        raise ValueError(
            f"max_length must be at least 2, one token of prompt and one new, not {max_length}"
        )
    if positions is not None and max_length > positions:
        raise ValueError(
            f"max_length={max_length} is more than the {positions} positions {type(lm).__name__} was made for; "
            f"pass max_length={positions} or less"
        )
    return max_length


def _eos_token_ids(lm: Any) -> tuple[int, ...]:
    """Return the tokens that end a text according to the model."""
    config = getattr(lm, "generation_config", None)
    declared = getattr(config, "eos_token_id", None)
    if declared is None:
        declared = getattr(lm.config.get_text_config(), "eos_token_id", None)
    if declared is None:
        return ()
    return (declared,) if isinstance(declared, int) else tuple(declared)


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    if len(one) <= len(other) and list(other[: len(one)]) == list(one):
        return len(one)
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
