"""One forward with its backward, for microbatches of several adapters."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinsmith_trainer.engines.batching import MicrobatchArrays, MicrobatchShape
from tinsmith_trainer.engines.losses import VALID, PreparedLoss
from tinsmith_trainer.engines.peft.adapter import Adapter
from tinsmith_trainer.engines.peft.logprobs import target_logprobs
from tinsmith_trainer.engines.peft.settings import PeftEngineSettings
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import UNEMBED_NAME, Route, StackedDelta, routed

PROBE_TOKENS = 8
PROBE_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Share:
    """One adapter's part of a forward. Its gradient adds up in `scratch`, flat; None computes the forward only."""

    adapter: Adapter
    arrays: MicrobatchArrays
    loss: PreparedLoss
    scratch: Tensor | None


@dataclass(frozen=True, slots=True)
class ShareResult:
    """Per row: logprobs `[rows, length]` or `[rows, length, K]`, loss and metrics `[rows]`; all float32."""

    logprobs: NDArray[np.float32]
    losses: NDArray[np.float32]
    metrics: Mapping[str, NDArray[np.float32]]


def run_shares(
    torch_model: TorchModel, shape: MicrobatchShape, shares: Sequence[Share], settings: PeftEngineSettings
) -> list[ShareResult]:
    """Computes shares of equal microbatch shape, rank and modules in one forward; adds gradients to their scratch.

    All shares train or none does. Takes the device's turn for its whole length.
    """
    trains = shares[0].scratch is not None
    with torch_model.turn.taken(), torch.set_grad_enabled(trains):
        route = _stack(shares, [_leaves(share) for share in shares])
        with routed(route):
            hidden = _hidden_states(torch_model, shape, shares, route, settings)
            computed = [
                _share_loss(torch_model, share, hidden[index], _one(route, index), settings)
                for index, share in enumerate(shares)
            ]
            if trains:
                torch.autograd.backward([loss.sum() for _, loss, _ in computed])
        return [_to_numpy(logprobs, loss, metrics) for logprobs, loss, metrics in computed]


def check_architecture(torch_model: TorchModel) -> None:
    """Raises ModelDirectoryInvalid for a model that is not layers, then one output projection, then softmax.

    Some architectures scale or cap their logits after the projection; training them as if they did not
    would be wrong without a sign, so a few tokens are compared with the model's own forward.
    """
    model, info = torch_model.model, torch_model.info
    if UNEMBED_NAME not in torch_model.layers or not hasattr(model.get_decoder(), "layers"):
        raise ModelDirectoryInvalid(
            f"{info.path} is a {info.architecture}, which has no decoder layers followed by {UNEMBED_NAME}; "
            f"the peft engine cannot train it."
        )
    tokens = torch.arange(PROBE_TOKENS, device=torch_model.device).unsqueeze(0) % info.vocab_size
    with torch_model.turn.taken(), torch.no_grad():
        own = model(input_ids=tokens, use_cache=False).logits.float()
        ours = torch_model.layers[UNEMBED_NAME](
            model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        )
    if not torch.allclose(own, ours.float(), rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE):
        raise ModelDirectoryInvalid(
            f"{info.path} is a {info.architecture}, which changes its logits after {UNEMBED_NAME}; "
            f"the peft engine cannot train it."
        )


@contextmanager
def recomputed(layers: Sequence[nn.Module], route: Route) -> Iterator[None]:
    """Layers called inside keep only their input, and run again in backward under the same route.

    For sequences whose activations would not fit. The route is handed to the recomputation because on an accelerator
    backward runs in another thread.
    """
    for layer in layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=lambda: (nullcontext(), routed(route))
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _leaves(share: Share) -> dict[str, Tensor]:
    """The adapter's tensors as leaves whose `.grad` is a view of the scratch, so that backward adds in place."""
    if share.scratch is None:
        return share.adapter.views
    leaves = {name: view.detach().requires_grad_() for name, view in share.adapter.views.items()}
    for name, gradient in share.adapter.layout.views(share.scratch).items():
        leaves[name].grad = gradient
    return leaves


def _stack(shares: Sequence[Share], leaves: Sequence[Mapping[str, Tensor]]) -> Route:
    first = shares[0].adapter
    scale = torch.tensor([share.adapter.scaling for share in shares], device=first.weights.device).view(-1, 1, 1)
    return {
        module: StackedDelta(
            _stacked([own[f"{module}.lora_A"] for own in leaves]),
            _stacked([own[f"{module}.lora_B"] for own in leaves]),
            scale,
            isolated=True,
        )
        for module in first.layout.modules
    }


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _one(route: Route, index: int) -> StackedDelta | None:
    """The output projection's delta of one share."""
    delta = route.get(UNEMBED_NAME)
    if delta is None:
        return None
    part = slice(index, index + 1)
    return StackedDelta(delta.lora_A[part], delta.lora_B[part], delta.scale[part], isolated=True)


def _hidden_states(
    torch_model: TorchModel,
    shape: MicrobatchShape,
    shares: Sequence[Share],
    route: Route,
    settings: PeftEngineSettings,
) -> Tensor:
    """Last hidden states `[shares, rows * length, d]`."""
    tokens = torch.from_numpy(np.concatenate([share.arrays.tokens for share in shares])).to(torch_model.device)
    decoder = torch_model.model.get_decoder()
    recompute = torch.is_grad_enabled() and shape.length > settings.checkpoint_above_tokens
    with recomputed(decoder.layers, route) if recompute else nullcontext():
        hidden: Tensor = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    return hidden.reshape(len(shares), shape.tokens, -1)


def _share_loss(
    torch_model: TorchModel, share: Share, hidden: Tensor, delta: StackedDelta | None, settings: PeftEngineSettings
) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    device = torch_model.device
    targets = torch.from_numpy(share.arrays.targets).to(device)
    inputs = {name: torch.from_numpy(values).to(device) for name, values in share.arrays.loss_inputs.items()}
    inputs[VALID] = torch.from_numpy(share.arrays.valid).to(device)
    head = torch_model.layers[UNEMBED_NAME]
    flat = targets.view(hidden.shape[0], -1)
    logprobs = target_logprobs(hidden, flat, head, delta, settings.logits_byte_budget).view(targets.shape)
    terms = share.loss(logprobs, inputs)
    return logprobs, terms.loss.flatten(1).sum(1), terms.metrics


def _to_numpy(logprobs: Tensor, loss: Tensor, metrics: Mapping[str, Tensor]) -> ShareResult:
    return ShareResult(
        logprobs.detach().cpu().numpy(),
        loss.detach().cpu().numpy(),
        {name: values.detach().float().cpu().numpy() for name, values in metrics.items()},
    )
