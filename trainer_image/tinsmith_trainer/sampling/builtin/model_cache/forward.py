"""Forwards of the shared model with the model's own cache: one sequence at a time, or rows of equal length.

The model creates the cache and the masks itself, so sequences cannot be padded. A forward takes the next tokens of one
sequence, or one token from each of several sequences with states that can be combined.

When a model is loaded, a trial checks that steps with the cache give the same logits as one forward over all tokens.
Architectures have many kinds of layers, and the code for caches can fail silently. The tolerance of the trial is a
fraction of the error that the model makes when it forgets all earlier tokens. So the tolerance does not depend on the
model's scale.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor

from tinsmith_trainer.errors import ModelDirectoryInvalid, ServerError
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.builtin.claims import ForwardCost
from tinsmith_trainer.sampling.builtin.forward import check_rotations, weight_bytes
from tinsmith_trainer.sampling.builtin.model_cache.states import SequenceStates, StateGeometry, UnlikeStates, together
from tinsmith_trainer.torch_model.loading import TorchModel, explain_non_finite
from tinsmith_trainer.torch_model.lora import Route, routed

log = structlog.get_logger(__name__)

CACHE_NAMES = ("past_key_values", "cache_params")
"""The names of a cache in the arguments and outputs of models."""


CURE = "Train it with --no-sampling, or sample it by another server."


def refusal_of(model: Any) -> str:
    """Return the beginning of the message for a refused model."""
    return f"The built-in sampler cannot run {type(model).__name__}:"


class CacheForward:
    """Forwards of the model.

    The constructor raises ServerError if the logits with the cache differ from the logits without a cache. `in_blocks`:
    prompts are computed block by block, not in one forward. `in_rows`: several sequences may share a forward in a step.
    """

    def __init__(self, torch_model: TorchModel, trial: Trial | None = None) -> None:
        self._model = torch_model.model
        self._turns = torch_model.shared_device.turns
        self.device: torch.device = torch_model.device
        self.modules = tuple(torch_model.layers)
        self.busy_seconds = 0.0
        check_rotations(torch_model)
        accepted = inspect.signature(self._model.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in accepted), CACHE_NAMES[0])
        self._keeps_last = "logits_to_keep" in accepted
        self._takes_positions = "position_ids" in accepted
        self._trial = Trial(torch_model) if trial is None else trial
        self.in_blocks = self._find_parts()
        self.geometry = self._measure()
        self.in_rows = self._try_rows()
        self.cost = ForwardCost.on(self.device.type, self.geometry.bytes_per_token / weight_bytes(self._model))

    @property
    def memory(self) -> str:
        """A description of how the memory of sequences is organized."""
        return "own cache, by blocks" if self.in_blocks else "own cache, prompts at once"

    @torch.inference_mode()
    def extend(
        self, states: SequenceStates | None, ids: Tensor, route: Route, *, all_logits: bool
    ) -> tuple[Tensor, SequenceStates]:
        """Compute `ids` `[rows, length]` after `states`. If `states` is None, new sequences begin.

        Do not use `states` after the call, because the call may change the object. Return the logits of all positions,
        `[rows, length, vocab]`, or of the last position, `[rows, 1, vocab]`, in float32.
        """
        rows, length = ids.shape
        before = 0 if states is None else states.tokens
        options: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_last and not all_logits else {}
        if self._takes_positions:  # otherwise some models begin at position 0 for any content of the cache
            positions = torch.arange(before, before + length, device=self.device)
            options["position_ids"] = positions.expand(rows, length)
        if states is not None:
            options[self._cache_name] = states.cache
        with self._turns.held(Use.SAMPLING), routed(route):
            started = time.perf_counter()
            output = self._model(input_ids=ids, use_cache=True, **options)
            self.busy_seconds += time.perf_counter() - started
        logits: Tensor = output.logits if all_logits else output.logits[:, -1:]
        return logits.float(), SequenceStates(output.get(self._cache_name), before + length, rows)

    @torch.inference_mode()
    def step(self, states: Sequence[SequenceStates], ids: Tensor, route: Route) -> tuple[Tensor, list[SequenceStates]]:
        """Compute one token for each sequence: `ids` `[rows, 1]`.

        Return logits `[rows, vocab]` in float32. Raises UnlikeStates if the sequences cannot be rows of one forward.
        """
        joined = states[0] if len(states) == 1 else together(states)
        logits, after = self.extend(joined, ids, route, all_logits=False)
        return logits[:, 0], [after] if len(states) == 1 else after.split()

    def _find_parts(self) -> bool:
        """Return whether prompts can be computed in blocks.

        Raises ServerError if the logits with the cache differ from the logits without a cache.
        """
        apart = []
        for parts in (PARTS, AT_ONCE):
            found = self._in_parts(self._trial.ids, parts)
            if self._trial.agrees(found):
                return parts is PARTS
            apart.append(self._trial.apart(found))
        raise ServerError(
            f"{refusal_of(self._model)} with transformers' own cache, too, its logprobs are {min(apart):.1e} apart "
            f"from those of one forward over all tokens. {CURE}"
        )

    def _in_parts(self, ids: Tensor, parts: Sequence[int]) -> Tensor:
        states: SequenceStates | None = None

        def compute(part: Tensor, _: int) -> Tensor:
            nonlocal states
            logits, states = self.extend(states, part, {}, all_logits=True)
            return logits[0]

        return in_parts(compute, ids, parts)

    def _measure(self) -> StateGeometry:
        """Measure how much memory sequences of two lengths take."""
        ids = self._trial.ids
        few, more = (self.extend(None, ids[:, :tokens], {}, all_logits=False)[1] for tokens in (8, 16))
        per_token = max(0, more.nbytes - few.nbytes) // (more.tokens - few.tokens)
        return StateGeometry(per_token, max(0, few.nbytes - few.tokens * per_token), self.device)

    def _try_rows(self) -> bool:
        """Return whether two sequences in one forward give the same logits as in separate forwards."""
        ids = [self._trial.tokens(seed) for seed in (0, 1)]
        states = [self.extend(None, each[:, :-1], {}, all_logits=False)[1] for each in ids]
        last = [each[:, -1:] for each in ids]
        try:
            found, _ = self.step([one.clone() for one in states], torch.cat(last), {})
        except UnlikeStates:
            return False
        except Exception as error:  # a model may fail in any way with unexpected rows
            log.info("steps are row by row", model=type(self._model).__name__, error=str(error))
            return False
        expected = torch.cat([self.step([one], each, {})[0] for one, each in zip(states, last, strict=True)])
        return self._trial.agrees(found, expected)


TOKENS = 40
PARTS = (16, 14, 7, 1, 1, 1)
"""The lengths of consecutive blocks and steps."""
AT_ONCE = (37, 1, 1, 1)
TOLERANCE, TOLERANCE_IN_HALVES = 1e-4, 0.1
"""The limits on the difference of logprobs, as fractions of the error of a model that forgets earlier tokens.

Rounding in float32 and bfloat16 stays below these limits, and a layer that forgets tokens exceeds the limits.
"""


class Trial:
    """A test sequence, and the logits of the model's own forward."""

    def __init__(self, torch_model: TorchModel) -> None:
        self._torch_model = torch_model
        self.ids = self.tokens()
        self._expected = self._logits(self.ids)
        if not self._expected.isfinite().all():
            raise ModelDirectoryInvalid(explain_non_finite(torch_model))
        forgetful = in_parts(lambda part, _: self._logits(part), self.ids, PARTS)
        tolerance = TOLERANCE if _rounds_to_float32(torch_model) else TOLERANCE_IN_HALVES
        self._most = tolerance * distance(forgetful, self._expected)

    def tokens(self, seed: int = 0) -> Tensor:
        """Return a sequence `[1, TOKENS]` of different tokens."""
        ids = (torch.arange(TOKENS) * 7 + 3 + 11 * seed) % self._torch_model.info.vocab_size
        return ids[None].to(self._torch_model.device)

    def agrees(self, found: Tensor, expected: Tensor | None = None) -> bool:
        """Return whether logits `[..., vocab]` agree with the logits of the test sequence, or with `expected`."""
        return self.apart(found, expected) <= self._most

    def apart(self, found: Tensor, expected: Tensor | None = None) -> float:
        """Return the mean difference of logprobs."""
        return distance(found, self._expected if expected is None else expected)

    @torch.inference_mode()
    def _logits(self, ids: Tensor) -> Tensor:
        """Return logits `[tokens, vocab]` of one forward without a cache."""
        with self._torch_model.shared_device.turns.held(Use.SAMPLING):
            logits: Tensor = self._torch_model.model(input_ids=ids, use_cache=False).logits
        return logits[0].float()


def _rounds_to_float32(torch_model: TorchModel) -> bool:
    """Return whether products have the precision of float32. With TF32 they have 11 bits, as float16 has."""
    has_tf32 = torch_model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return torch_model.model.dtype == torch.float32 and not has_tf32


def in_parts(compute: Callable[[Tensor, int], Tensor], ids: Tensor, parts: Sequence[int]) -> Tensor:
    """Return logits `[tokens, vocab]`.

    The arguments of `compute` are the next tokens and the number of earlier tokens.
    """
    ends = [sum(parts[: n + 1]) for n in range(len(parts))]
    return torch.cat([compute(ids[:, end - size : end], end - size) for size, end in zip(parts, ends, strict=True)])


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the mean difference of logprobs of logits `[..., vocab]`."""
    return float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().mean())
