"""The reference: plain transformers, PEFT's own LoRA layers and torch's AdamW, one datum at a time, in a loop.

The reference shares only two things with the engines: the losses, which have separate tests, and the initial A. PEFT
has no adapters of experts with shared factors. So the deltas of experts are added to the weights of transformers' own
layers, and autograd computes the gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from tinsmith_trainer.engines import adapters
from tinsmith_trainer.engines.base import AdamParams, AdapterState, Datum, LoraSpec, Outcome, Work
from tinsmith_trainer.engines.losses import TARGETS, VALID, LossArrays, PreparedLoss, Terms, prepare_loss
from tinsmith_trainer.engines.peft_layout import peft_targets
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.parity.undivided_calls import UndividedCallRunner
from tinsmith_trainer.torch_model.architecture import auto_class
from tinsmith_trainer.torch_model.base_model import BaseModelInfo, model_directory
from tinsmith_trainer.torch_model.device import choose_device
from tinsmith_trainer.torch_model.experts import DOWN, GATE, UP, ExpertProjection, expert_projections
from tinsmith_trainer.torch_model.loading import describe_model, is_of_text
from tinsmith_trainer.torch_model.lora import is_plain_linear, module_family
from tinsmith_trainer.torch_model.stored_weights import checked_config


class _Delta(nn.Module):
    """The delta of one projection: A `[experts or 1, rank, d_in]`, B `[experts or 1, d_out, rank]`."""

    def __init__(self, projection: ExpertProjection, lora: LoraSpec, device: torch.device) -> None:
        super().__init__()
        shape_A, shape_B = projection.lora_shapes(lora.rank)
        self.key = projection.key
        self.lora_A = nn.Parameter(torch.zeros(shape_A, device=device))
        self.lora_B = nn.Parameter(torch.zeros(shape_B, device=device))
        self.scaling = lora.alpha / lora.rank

    def weight(self) -> Tensor:
        """Return `[experts, d_out, d_in]`."""
        return torch.matmul(self.lora_B, self.lora_A) * self.scaling


class _PlusDeltas(nn.Module):
    """A torch parametrization of one parameter, which may hold both gate and up."""

    def __init__(self, deltas: list[_Delta], *, is_concatenated: bool, is_transposed: bool) -> None:
        super().__init__()
        self.deltas = nn.ModuleList(deltas)
        self.is_concatenated = is_concatenated
        self.is_transposed = is_transposed

    @override
    def forward(self, weight: Tensor) -> Tensor:
        parts = [delta.weight() for delta in self.deltas if isinstance(delta, _Delta)]
        concatenates = self.is_concatenated or len(parts) == 1
        joined = torch.cat(parts, 1) if concatenates else torch.stack(parts, 2).flatten(1, 2)
        return weight + (joined.mT if self.is_transposed else joined).to(weight.dtype)


def add_to_experts(model: nn.Module, projections: Mapping[str, ExpertProjection], lora: LoraSpec) -> None:
    for name in sorted({key.rpartition(".")[0] for key in projections}):
        module: Any = model.get_submodule(name)
        ups, up = ((GATE, UP), "gate_up_proj") if module.has_gate else ((GATE,), "up_proj")
        for parts, parameter in ((ups, up), ((DOWN,), "down_proj")):
            device = getattr(module, parameter).device
            deltas = [_Delta(projections[f"{name}.{part}"], lora, device) for part in parts]
            added = _PlusDeltas(deltas, is_concatenated=module.is_concatenated, is_transposed=module.is_transposed)
            parametrize.register_parametrization(module, parameter, added)


def trained_by_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of experts, with the names that the engines use."""
    deltas = [module for module in model.modules() if isinstance(module, _Delta)]
    return {
        f"{delta.key}.{part}": parameter
        for delta in deltas
        for part, parameter in delta.named_parameters(recurse=False)
    }


PREFIX, SUFFIX = "base_model.model.", ".default.weight"


@dataclass(frozen=True, slots=True)
class _Trained:
    """PEFT's parameters, with the names that the engines use, and the optimizer of these parameters."""

    lora: LoraSpec
    model: Any
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.AdamW


class PeftReference(UndividedCallRunner[PreparedLoss]):
    """A `Side` with only one adapter at a time. Each adapter has a separate copy of the base model."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._directory = model_directory(options.model, options.model_revision)
        self._config = checked_config(self._directory)
        self._adapters: dict[str, _Trained] = {}

    def base_model(self) -> BaseModelInfo:
        return describe_model(self._options.model, self._directory, self._config)

    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        model = _peft_model(
            self._directory, self._config, choose_device(self._options.device, self._options.dtype), lora
        )
        ordered = dict(sorted(_trained_parameters(model).items()))
        shapes = {name: tuple(parameter.shape) for name, parameter in ordered.items()}
        with torch.no_grad():
            for name, drawn in adapters.draw(lora.seed, shapes):
                ordered[name].copy_(drawn)
        self._adapters[adapter_id] = _Trained(lora, model, ordered, torch.optim.AdamW(ordered.values()))

    @override
    def prepare(self, work: Work) -> PreparedLoss:
        return prepare_loss(work.loss, work.datums)

    @override
    def compute(self, work: Work, prepared: PreparedLoss) -> Outcome:
        model, loss = self._adapters[work.adapter_id].model, prepared
        total, outputs = 0.0, []
        for datum, arrays in zip(work.datums, loss.arrays, strict=True):
            with torch.set_grad_enabled(not work.forward_only):
                logprobs = _logprobs(model, datum)
                summed = _terms(loss, logprobs, arrays).loss.sum()
            if not work.forward_only:
                torch.autograd.backward(summed)
            total += float(summed.detach())
            outputs.append({"logprobs": logprobs.detach().cpu().numpy()})
        return Outcome(outputs, {"loss:sum": total})

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        trained = self._adapters[adapter_id]
        trained.optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        norm = nn.utils.clip_grad_norm_(trained.parameters.values(), params.grad_clip_norm or float("inf"))
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        return {"grad_norm": float(norm)}

    def state(self, adapter_id: str) -> AdapterState:
        trained = self._adapters[adapter_id]
        tensors = {
            f"weights/{name}": value.detach().float().cpu().numpy().copy() for name, value in trained.parameters.items()
        }
        return AdapterState(trained.lora, 0, tensors)

    def drop(self, adapter_id: str) -> None:
        self._adapters.pop(adapter_id, None)


def _peft_model(directory: Path, config: Any, placement: tuple[str, torch.dtype], lora: LoraSpec) -> Any:
    from peft import LoraConfig, get_peft_model

    device, dtype = placement
    base = auto_class(config).from_pretrained(directory, config=config, dtype=dtype).eval().to(device)
    linears = [
        name
        for name, module in base.named_modules()
        if is_plain_linear(module) and module_family(name) and is_of_text(base, name)
    ]
    experts = expert_projections(base)
    modules = adapters.trained_modules(lora, [*linears, *experts])
    target_modules, target_parameters = peft_targets(
        [name for name in modules if name not in experts], has_experts=bool(experts)
    )
    lora_config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=target_modules,
        target_parameters=target_parameters,
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the warnings are about merged tied embeddings, which do not occur here, and about moved names
        model = get_peft_model(base, lora_config)
    add_to_experts(base, {name: experts[name] for name in modules if name in experts}, lora)
    return model


def _trained_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters, with the names that the engines use."""
    peft = {
        name.removeprefix(PREFIX).removesuffix(SUFFIX): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name.endswith(SUFFIX)
    }
    return {**peft, **trained_by_experts(model)}


def _logprobs(model: Any, datum: Datum) -> Tensor:
    """Return the logprobs of the targets, in the targets' shape, from one sequence without padding."""
    tokens = torch.from_numpy(datum.tokens).long().to(model.device)
    targets = torch.from_numpy(datum.loss_inputs[TARGETS]).to(model.device)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1).gather(-1, targets.reshape(len(tokens), -1)).view(targets.shape)


def _terms(loss: PreparedLoss, logprobs: Tensor, arrays: LossArrays) -> Terms:
    inputs = {name: torch.from_numpy(values)[None].to(logprobs.device) for name, values in arrays.items()}
    valid = torch.ones(1, len(logprobs), dtype=torch.bool, device=logprobs.device)
    return loss(logprobs[None], {**inputs, VALID: valid})
