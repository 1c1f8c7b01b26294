"""The comparison of a program's needs with the capabilities of a served model.

A capability that is unknown, because no worker of the model has started yet, meets each need.
"""

from __future__ import annotations

from collections.abc import Iterator

from tinsmith_server.wire.needs import InvalidNeeds, Needs, needs_in
from tinsmith_server.wire.requests import CreateModelRequest
from tinsmith_server.wire.responses import SupportedModel


class NeedsUnmet(ValueError):
    """The model does not meet needs of the program. The message is for the user."""


def check_needs(request: CreateModelRequest, model: SupportedModel) -> None:
    """Check the needs in the metadata of a creation, so that the run does not fail later. Raises NeedsUnmet."""
    try:
        needs = needs_in(request.user_metadata)
    except InvalidNeeds as error:
        raise NeedsUnmet(str(error)) from error
    if needs is None:
        return
    if unmet := list(unmet_needs(needs.model_copy(update={"rank": request.lora_config.rank}), model)):
        raise NeedsUnmet("; ".join(unmet))


def unmet_needs(needs: Needs, model: SupportedModel) -> Iterator[str]:
    """Yield a sentence for each need that the model does not meet."""
    name = model.model_name
    if needs.sampling and not model.sampleable:
        yield f"{name} is served for training only; add a SamplerPool, or leave out sampling"
    if needs.context is not None and model.max_context_length is not None and needs.context > model.max_context_length:
        yield f"{name} has a context of {model.max_context_length} tokens, and the program needs {needs.context}"
    for need, known, what in ((needs.images, model.images, "images"), (needs.audio, model.audio, "audio")):
        if need and known is False:
            yield f"{name} does not take {what}"
    yield from _unmet_in_training(needs, model)
    if needs.numerics is not None and model.numerics not in (None, needs.numerics):
        yield f"{name} has {model.numerics} numerics, and the program needs {needs.numerics}"
    if needs.quantization is not None and needs.quantization != (model.quantization or "none"):
        yield f"{name} has weights in {model.quantization or 'full precision'}, not in {needs.quantization}"


def _unmet_in_training(needs: Needs, model: SupportedModel) -> Iterator[str]:
    name = model.model_name
    trains = bool(needs.losses or needs.optimizer or needs.modules or (needs.rank and not needs.sampling))
    if trains and not model.trainable:
        yield f"{name} is served for sampling only"
        return
    for loss in needs.losses:
        if model.losses is not None and loss not in model.losses:
            yield f"{name} does not have the loss {loss!r}; it has {', '.join(model.losses)}"
    if needs.optimizer is not None and needs.optimizer not in model.optimizers:
        yield f"{name} does not have the optimizer {needs.optimizer!r}; it has {', '.join(model.optimizers)}"
    for limit, use in ((model.max_rank, "trained"), (model.max_sampling_rank if needs.sampling else None, "sampled")):
        if needs.rank is not None and limit is not None and needs.rank > limit:
            yield f"{name} is {use} up to LoRA rank {limit}, and the program needs {needs.rank}"
    for module in needs.modules:
        if model.modules is not None and module not in model.modules:
            yield f"{name} cannot train {module}; LoRA trains {', '.join(model.modules)}"
