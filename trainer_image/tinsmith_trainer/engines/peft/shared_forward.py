"""A forward with its backward, for microbatches of several adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinsmith_trainer.engines.peft.logprobs import Head, target_logprobs
from tinsmith_trainer.engines.peft.settings import PeftEngineSettings
from tinsmith_trainer.engines.peft.share_losses import LossBatch, ShareResult, joined_targets, plan_batches
from tinsmith_trainer.engines.peft.shares import Share, joins_shares, plan_layout, plan_route, product_tokens
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.torch_model.loading import TorchModel, explain_non_finite
from tinsmith_trainer.torch_model.lora import UNEMBED_NAME, Route, routed
from tinsmith_trainer.torch_model.packing import Packing, packed_hidden_states

PROBE_TOKENS = 8
PROBE_TOLERANCE = 1e-2
PROBE_LOGITS = 100.0


def run_shares(torch_model: TorchModel, shares: Sequence[Share], settings: PeftEngineSettings) -> list[ShareResult]:
    """Compute shares in one forward, all packed or all of one padded length, and add gradients to their scratch.

    They may have any number of datums, and adapters of any rank and modules. With `numerics: exact` their products take
    equally many tokens. All shares train or none does. One turn of the device.
    """
    trains = shares[0].scratch is not None
    with torch_model.shared_device.turns.held(Use.TRAINING), torch.set_grad_enabled(trains):
        torch_model.memory.begin(settings.logits_byte_budget)
        batches = plan_batches(shares, joined=joins_shares(torch_model, settings))
        ordered = [share for batch in batches for share in batch.shares]
        layout = plan_layout(ordered, settings)
        plan = plan_route(torch_model, ordered, layout, settings)
        with routed(plan.route):
            hidden = _hidden_states(torch_model, ordered, layout, plan.route, settings)
            logprobs = _logprobs(torch_model, batches, hidden, plan.heads, settings)
            computed = [batch.loss(own) for batch, own in zip(batches, logprobs, strict=True)]
            if trains:
                torch.autograd.backward([loss.sum() for _, loss, _ in computed])
                plan.add_collected(ordered)
        results = [part for batch, own in zip(batches, computed, strict=True) for part in batch.split(_to_numpy(*own))]
        return [result for _, result in sorted(results, key=itemgetter(0))]


def check_architecture(torch_model: TorchModel) -> None:
    """Raise ModelDirectoryInvalid if a model has more parts than layers, one output projection, and softmax.

    Training would silently miss other operations on hidden states or logits. So a few tokens run through the model's
    own forward, with logits so large that a cap is visible.
    """
    info = torch_model.info
    if UNEMBED_NAME not in torch_model.layers or not hasattr(torch_model.decoder, "layers"):
        raise ModelDirectoryInvalid(
            f"{info.path} is a {info.architecture}, which has no decoder layers followed by {UNEMBED_NAME}; "
            f"the peft engine cannot train it."
        )
    if not _is_finite(torch_model):
        raise ModelDirectoryInvalid(explain_non_finite(torch_model))
    if not _ends_as_known(torch_model):
        raise ModelDirectoryInvalid(
            f"{info.path} is a {info.architecture}, which changes hidden states before {UNEMBED_NAME}, or logits after "
            f"it, in a way that the peft engine does not support."
        )


@torch.no_grad()
def _is_finite(torch_model: TorchModel) -> bool:
    with torch_model.shared_device.turns.held(Use.TRAINING):
        logits: Tensor = torch_model.model(input_ids=_probe(torch_model), use_cache=False).logits
    return bool(logits.isfinite().all())


def _probe(torch_model: TorchModel) -> Tensor:
    return torch.arange(PROBE_TOKENS, device=torch_model.device).unsqueeze(0) % torch_model.info.vocab_size


def _ends_as_known(torch_model: TorchModel) -> bool:
    """Return whether the projection's input is the decoder's output, and only `logit_transform` follows it."""
    model, seen, made = torch_model.model, [], []

    def with_large_logits(_: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        seen.append(inputs[0])
        made.append(torch.linspace(-PROBE_LOGITS, PROBE_LOGITS, logits.numel()).view_as(logits).to(logits))
        return made[-1]

    tokens = _probe(torch_model)
    hook = torch_model.unembed.register_forward_hook(with_large_logits)
    try:
        with torch_model.shared_device.turns.held(Use.TRAINING), torch.no_grad():
            states = torch_model.decoder(input_ids=tokens, use_cache=False).last_hidden_state
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    return _alike(seen[0], states) and _alike(logits, torch_model.logit_transform(made[0]))


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE)


@contextmanager
def recomputed(layers: Sequence[nn.Module], route: Route, layout: Packing | None = None) -> Iterator[None]:
    """Let layers keep only their input, and run again in backward under the same route and attention.

    For sequences whose activations would not fit. Route and attention are passed to the recomputation because on an
    accelerator backward runs in another thread. A sampler that has a turn meanwhile recomputes nothing.
    """

    @contextmanager
    def again() -> Iterator[None]:
        with routed(route), nullcontext() if layout is None else layout.attended():
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), again()

    def keeping_inputs(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **options)

    for layer in layers:
        layer.forward = functools.partial(keeping_inputs, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _hidden_states(
    torch_model: TorchModel, shares: Sequence[Share], layout: Packing | None, route: Route, settings: PeftEngineSettings
) -> Tensor:
    """Return the last hidden states of all shares, `[tokens, d]`."""
    decoder = torch_model.decoder
    tokens = sum(share.shape.tokens for share in shares)
    recompute = torch.is_grad_enabled() and tokens > settings.recompute_above_tokens
    with recomputed(decoder.layers, route, layout) if recompute else nullcontext():
        if layout is not None:
            packed = np.concatenate([share.arrays.tokens[share.arrays.valid] for share in shares])
            hidden = packed_hidden_states(decoder, torch.from_numpy(packed).to(torch_model.device), layout)
            return hidden[:tokens]
        rows = torch.from_numpy(np.concatenate([share.arrays.tokens for share in shares])).to(torch_model.device)
        if (inputs := shares[0].image_inputs) is not None:  # the whole model computes embeddings, positions and mask
            hidden = torch_model.model.base_model(input_ids=rows, use_cache=False, **inputs).last_hidden_state
        else:
            hidden = decoder(input_ids=rows, use_cache=False).last_hidden_state
    rows_in_turn: Tensor = hidden.flatten(0, 1)
    return rows_in_turn


def _logprobs(
    torch_model: TorchModel,
    batches: Sequence[LossBatch],
    hidden: Tensor,
    heads: Sequence[Head],
    settings: PeftEngineSettings,
) -> Sequence[Tensor]:
    """Return the logprobs `[tokens, K]` of each batch. One head serves all batches, or each batch has its own."""
    together = [batches] if len(heads) == 1 else [[batch] for batch in batches]
    sizes = [batch.tokens for batch in batches]
    parts = [hidden] if len(heads) == 1 else torch.split(hidden, sizes)
    computed = [
        target_logprobs(
            part,
            torch.from_numpy(joined_targets(group)).to(torch_model.device),
            torch_model.unembed,
            head,
            product_tokens=product_tokens(torch_model, group[0].shares[0], settings),
            byte_budget=settings.logits_byte_budget,
            kernel=settings.loss_kernel,
            transform=torch_model.logit_transform,
            memory=torch_model.memory,
        )
        for group, part, head in zip(together, parts, heads, strict=True)
    ]
    of_batches = torch.split(computed[0], sizes) if len(heads) == 1 else computed
    return [batch.own_targets(logprobs) for batch, logprobs in zip(batches, of_batches, strict=True)]


def _to_numpy(logprobs: Tensor, loss: Tensor, metrics: Mapping[str, Tensor]) -> ShareResult:
    return ShareResult(
        logprobs.detach().cpu().numpy(),
        loss.detach().cpu().numpy(),
        {name: values.detach().float().cpu().numpy() for name, values in metrics.items()},
    )
