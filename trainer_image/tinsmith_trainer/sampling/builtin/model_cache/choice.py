"""The choice of the memory for sequences, of the forward and of the batches, for each model.

If all layers keep keys and values in one shape, the sampler stores keys and values in its own tensors, in rows of any
length. For all other models, the sampler uses the model's own cache. When the model is loaded, a trial decides which
cache is used.
"""

from __future__ import annotations

from typing import Any

import structlog
import torch

from tinsmith_trainer.errors import ServerError, is_out_of_memory
from tinsmith_trainer.sampling.builtin.batch import BatchKey, BatchPlan, DecodeBatch
from tinsmith_trainer.sampling.builtin.forward import ForwardPass, check_rotations
from tinsmith_trainer.sampling.builtin.jobs import Run
from tinsmith_trainer.sampling.builtin.kv_cache import SharedPrefix
from tinsmith_trainer.sampling.builtin.model_cache.batch import CacheBatch
from tinsmith_trainer.sampling.builtin.model_cache.forward import (
    CURE,
    PARTS,
    TOKENS,
    CacheForward,
    Trial,
    in_parts,
    refusal_of,
)
from tinsmith_trainer.sampling.builtin.model_cache.prompts import CachePrefill
from tinsmith_trainer.sampling.builtin.prefill import Prefill
from tinsmith_trainer.sampling.builtin.prefix_cache import PrefixCache
from tinsmith_trainer.torch_model.device import end_if_device_is_lost
from tinsmith_trainer.torch_model.loading import TorchModel

log = structlog.get_logger(__name__)

SamplerForward = ForwardPass | CacheForward
AnyPrefill = Prefill | CachePrefill
AnyBatch = DecodeBatch | CacheBatch


def choose_forward(torch_model: TorchModel) -> SamplerForward:
    """Choose the forward. Raises ServerError for an architecture that no forward can serve."""
    check_rotations(torch_model)
    trial = Trial(torch_model)
    try:
        by_keys = ForwardPass(torch_model)
        if trial.agrees(_in_parts(by_keys, trial.ids)):
            return by_keys
        reason = "with keys and values alone its logits are others"
    except ServerError as error:
        reason = str(error)
    except Exception as error:  # a model may fail in any way with a cache of keys and values alone
        reason = _of_the_model(error)
    by_cache = _by_cache(torch_model, trial)
    log.info(
        "samples are drawn with transformers' own cache, which is slower",
        model=type(torch_model.model).__name__,
        reason=reason,
        memory=by_cache.memory,
        steps="sequences of one length together" if by_cache.in_rows else "one by one",
    )
    return by_cache


def _by_cache(torch_model: TorchModel, trial: Trial) -> CacheForward:
    """Return a forward with the model's own cache. Raises ServerError if the trial fails."""
    try:
        return CacheForward(torch_model, trial)
    except ServerError:
        raise
    except Exception as error:  # a model may fail in any way with its own cache
        reason = _of_the_model(error)
        raise ServerError(f"{refusal_of(torch_model.model)} its own cache fails with {reason}. {CURE}") from error


def _of_the_model(error: Exception) -> str:
    """Return a description of an error that the model itself causes.

    If the cause is the memory or the device, the error is raised again.
    """
    if is_out_of_memory(error):
        raise error
    end_if_device_is_lost(error)
    return f"{type(error).__name__}: {error}".rstrip(".")


def open_prompt(
    run: Run, forward: SamplerForward, prefixes: PrefixCache[Any], plan: BatchPlan, shared: SharedPrefix | None
) -> AnyPrefill:
    if isinstance(forward, CacheForward):
        return CachePrefill(run, forward, prefixes, plan)
    return Prefill(run, forward, prefixes, plan, shared)


def open_batch(key: BatchKey, plan: BatchPlan, forward: SamplerForward) -> AnyBatch:
    if isinstance(forward, CacheForward):
        return CacheBatch(key, plan, forward)
    return DecodeBatch(key, plan, forward)


@torch.inference_mode()
def _in_parts(forward: ForwardPass, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of blocks and steps, computed with the sampler's own keys and values."""
    kv = forward.geometry.allocate(1, TOKENS)

    def compute(part: torch.Tensor, start: int) -> torch.Tensor:
        if part.shape[1] > 1:
            return forward.block(kv, part, start, {}, all_logits=True)
        position = torch.full((1, 1), start, device=forward.device)
        return forward.step(kv, part, position, TOKENS, {})

    return in_parts(compute, ids, PARTS)
