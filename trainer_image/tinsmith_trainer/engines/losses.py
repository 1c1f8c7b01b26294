"""Training losses over target logprobs, for all engines: plain sums over the tokens of a call.

Notation: `lp` is the logprob of the target under the current weights, `q` is the sampler's logprob (input `logprobs`),
`A` is the input `advantages`, and `r = exp(lp - q)`. Formulas come from the vendor's public documentation
(tinker-docs.thinkingmachines.ai, pages under tinker/losses/). `gspo` is GSPO-token of arXiv 2507.18071, section 4.3.
Tokens with a weight or advantage of 0 are masked before any `exp`, because 0 times infinity is NaN. The penalty of DRO
also covers masked tokens. Clip thresholds are ratios, not distances from 1. If a parameter has several values, a
per-token input overrides the config, and the config overrides the default.

The loss `custom` evaluates a user's graph (see `custom_losses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from tinsmith_rpc import CUSTOM_LOSS
from torch import Tensor

from tinsmith_trainer.engines.base import Datum, LossSpec, Outcome, Work
from tinsmith_trainer.engines.custom_losses.program import Program
from tinsmith_trainer.engines.custom_losses.rows import custom_arrays, program_for, row_losses
from tinsmith_trainer.errors import UserError

Inputs = Mapping[str, Tensor]
LossArrays = Mapping[str, NDArray[np.float32] | NDArray[np.int64]]

TARGETS = "target_tokens"
VALID = "valid"
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
STABLE_REINFORCE = "stable_reinforce"
KL_COEFF = "kl_coeff"

LARGEST_LOG_RATIO = 88.72
"""The largest log ratio: `exp` of a larger value overflows float32."""

_Reduction = Callable[[Sequence[float]], float]
_REDUCTIONS: Mapping[str, _Reduction] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}


@dataclass(frozen=True, slots=True)
class Terms:
    """The `loss` of each target, shaped like `lp`, and metrics `[rows]` by `name:reduction` (sum, mean, min, max)."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Definition:
    """A loss function.

    `required` and `optional` are per-token inputs; `config` maps the keys of a config to default values.
    """

    terms: Callable[[Tensor, Inputs], Terms]
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    config: Mapping[str, float] = field(default_factory=dict)
    several_targets: bool = False


def _cross_entropy(lp: Tensor, inputs: Inputs) -> Terms:
    """Return `-w * lp`. Weights may be negative and of any size."""
    weights = inputs["weights"]
    active = weights != 0
    return Terms(-weights * torch.where(active, lp, 0.0), {"tokens:sum": _per_row(active)})


def _importance_sampling(lp: Tensor, inputs: Inputs) -> Terms:
    """Return `-r * A`."""
    active, ratio = _ratio(lp, inputs)
    return Terms(-ratio * inputs["advantages"], _policy_metrics(lp, inputs, active))


def _ppo(lp: Tensor, inputs: Inputs) -> Terms:
    """Return `-min(r * A, clip(r, low, high) * A)`."""
    active = inputs["advantages"] != 0
    return _clipped_surrogate(lp, inputs, active, torch.where(active, lp - inputs["logprobs"], 0.0))


def _cispo(lp: Tensor, inputs: Inputs) -> Terms:
    """Return `-stop_grad(clip(r, low, high)) * A * lp`."""
    active, ratio = _ratio(lp.detach(), inputs)
    clipped = torch.clamp(ratio, inputs[LOW], inputs[HIGH])
    metrics = _policy_metrics(lp, inputs, active) | {"clipped:sum": _per_row(active & (clipped != ratio))}
    return Terms(-clipped * inputs["advantages"] * torch.where(active, lp, 0.0), metrics)


def _stable_reinforce(lp: Tensor, inputs: Inputs) -> Terms:
    """Return the cispo loss plus `kl_coeff / 2 * (lp - q)^2` for each token with an advantage.

    This loss has no public definition; the formula is Tinsmith's interpretation. The penalty is the second-order
    estimate of the KL divergence between sampler and model (k2 of joschu.net/blog/kl-approx.html). The penalty is never
    negative, and the gradient of the penalty is `kl_coeff * (lp - q)`.
    """
    surrogate = _cispo(lp, inputs)
    # A coefficient of 0 must give 0 even if the square overflows float32.
    penalised = (inputs["advantages"] != 0) & (inputs[KL_COEFF] != 0)
    gap = torch.where(penalised, lp - inputs["logprobs"], 0.0)
    return Terms(surrogate.loss + 0.5 * inputs[KL_COEFF] * gap**2, surrogate.metrics)


def _gspo(lp: Tensor, inputs: Inputs) -> Terms:
    """Return the ppo loss. All tokens of a sequence have the ratio `exp(mean over sequence_ratio_mask of (lp - q))`.

    The gradient of a row's ratio flows through the `lp` of each token.
    """
    active = inputs["advantages"] != 0
    averaged = inputs["sequence_ratio_mask"] != 0
    log_ratio = torch.where(averaged, lp.detach() - inputs["logprobs"], 0.0)
    mean = log_ratio.sum(1, keepdim=True) / averaged.sum(1, keepdim=True).clamp(min=1)
    own = torch.where(active & (lp > -math.inf), lp, 0.0)  # -inf minus -inf is NaN
    return _clipped_surrogate(lp, inputs, active, torch.where(active, mean + (own - own.detach()), 0.0))


def _dro(lp: Tensor, inputs: Inputs) -> Terms:
    """Return `-(lp * A - beta / 2 * (lp - q)^2)`. The penalty covers all tokens of the datum."""
    covered = torch.where(inputs[VALID], lp, 0.0)
    objective = covered * inputs["advantages"] - 0.5 * inputs["beta"] * (covered - inputs["logprobs"]) ** 2
    active = inputs["advantages"] != 0
    return Terms(torch.where(inputs[VALID], -objective, 0.0), _policy_metrics(lp, inputs, active))


def _ratio(lp: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    active = inputs["advantages"] != 0
    return active, torch.exp(torch.where(active, lp - inputs["logprobs"], 0.0))


def _clipped_surrogate(lp: Tensor, inputs: Inputs, active: Tensor, log_ratio: Tensor) -> Terms:
    # The minimum discards an infinite ratio, but its gradient of 0 passes through `exp`: 0 times infinity is NaN.
    overflows = (log_ratio > LARGEST_LOG_RATIO) & (inputs["advantages"] > 0)
    ratio = torch.where(overflows, inputs[HIGH], torch.exp(torch.where(overflows, 0.0, log_ratio)))
    free = ratio * inputs["advantages"]
    clipped = torch.clamp(ratio, inputs[LOW], inputs[HIGH]) * inputs["advantages"]
    metrics = _policy_metrics(lp, inputs, active) | {"clipped:sum": _per_row(overflows | (active & (clipped < free)))}
    return Terms(-torch.minimum(free, clipped), metrics)


def _policy_metrics(lp: Tensor, inputs: Inputs, active: Tensor) -> dict[str, Tensor]:
    """Return metrics over tokens with an advantage.

    `sampler_kl` is the sum of `q - lp`, and `sampler_gap` the largest `|lp - q|`.
    """
    with torch.no_grad():
        gap = torch.where(active, inputs["logprobs"] - lp, 0.0)
        return {
            "tokens:sum": _per_row(active),
            "sampler_kl:sum": gap.sum(1),
            "sampler_gap:max": gap.abs().amax(1),
        }


def _per_row(flags: Tensor) -> Tensor:
    return flags.flatten(1).sum(1)


_POLICY_INPUTS = frozenset({TARGETS, "logprobs", "advantages"})
_CLIP_INPUTS = frozenset({LOW, HIGH})

_DEFINITIONS: Mapping[str, _Definition] = {
    "cross_entropy": _Definition(_cross_entropy, frozenset({TARGETS}), frozenset({"weights"}), several_targets=True),
    "importance_sampling": _Definition(_importance_sampling, _POLICY_INPUTS),
    "ppo": _Definition(_ppo, _POLICY_INPUTS, _CLIP_INPUTS, {LOW: 0.8, HIGH: 1.2}),
    "cispo": _Definition(_cispo, _POLICY_INPUTS, _CLIP_INPUTS, {LOW: 0.0, HIGH: 4.0}),
    "gspo": _Definition(_gspo, _POLICY_INPUTS, _CLIP_INPUTS | {"sequence_ratio_mask"}, {LOW: 0.8, HIGH: 1.2}),
    "dro": _Definition(_dro, _POLICY_INPUTS, config={"beta": 0.05}),
    STABLE_REINFORCE: _Definition(
        _stable_reinforce, _POLICY_INPUTS, _CLIP_INPUTS, {LOW: 0.0, HIGH: 4.0, KL_COEFF: 0.0}
    ),
}


def loss_names(*, map_stable_reinforce: bool = True, custom: bool = False) -> tuple[str, ...]:
    """Return the losses that clients may use. If `custom` is true, the list includes custom losses."""
    names = tuple(name for name in _DEFINITIONS if map_stable_reinforce or name != STABLE_REINFORCE)
    return (*names, CUSTOM_LOSS) if custom else names


def _definition_of(name: str, *, map_stable_reinforce: bool) -> _Definition:
    """Return a loss's definition. Raises UserError for an unknown or disabled name."""
    known = loss_names(map_stable_reinforce=map_stable_reinforce)
    if name not in known:
        raise UserError(f"Unknown loss {name!r}. Supported are {', '.join(known)}.")
    return _DEFINITIONS[name]


@dataclass(frozen=True, slots=True)
class PreparedLoss:
    """A call's loss, with a checked config and complete per-token inputs.

    `arrays[i]` holds the per-token inputs of datum i, float32 in the shape of the datum's targets. `program` is set for
    a custom loss; inputs of a custom loss may be int64, and may have another number of columns than the targets.
    """

    name: str
    config: Mapping[str, float]
    arrays: Sequence[LossArrays]
    program: Program | None = None

    def __call__(self, lp: Tensor, inputs: Inputs) -> Terms:
        """Compute the loss for `lp` float32 `[rows, length]` or `[rows, length, K]`.

        `inputs` have the same shape, and also contain `valid`, which is bool. Padding must be 0 in every input and
        False in `valid`.
        """
        if self.program is not None:
            found = row_losses(self.program, lp, inputs, inputs[VALID])
            return Terms(found.loss, found.metrics)
        config = {name: torch.tensor(value) for name, value in self.config.items() if name not in inputs}
        return _DEFINITIONS[self.name].terms(lp, {**config, **inputs})

    def without_arrays(self) -> PreparedLoss:
        """Return the loss without per-token inputs, for batches that already contain the inputs."""
        return replace(self, arrays=())

    def standing_metrics(self) -> dict[str, float]:
        """Return the metric for a call in which another loss was computed instead of the requested loss."""
        return {"stable_reinforce_as_cispo:max": 1.0} if self.name == STABLE_REINFORCE else {}


def prepare_loss(
    spec: LossSpec, datums: Sequence[Datum], *, map_stable_reinforce: bool = True, custom: bool = False
) -> PreparedLoss:
    """Check a call's loss, config and inputs. Raises UserError, with the datum and the key, if an input is invalid."""
    if spec.name == CUSTOM_LOSS:
        return _prepare_custom(spec, datums, runs_here=custom)
    definition = _definition_of(spec.name, map_stable_reinforce=map_stable_reinforce)
    config = _checked_config(spec, definition)
    arrays = [_checked_inputs(index, datum, spec.name, definition, config) for index, datum in enumerate(datums)]
    return PreparedLoss(spec.name, config, arrays)


def _prepare_custom(spec: LossSpec, datums: Sequence[Datum], *, runs_here: bool) -> PreparedLoss:
    if not runs_here:
        raise UserError(
            "This model's engine does not support custom losses. Pass the function itself to "
            "forward_backward_custom, which runs it on the client."
        )
    program = program_for(spec)
    for index, datum in enumerate(datums):
        if TARGETS not in datum.loss_inputs:
            raise UserError(f"Datum {index}: {CUSTOM_LOSS} needs the input {TARGETS}.")
        _check_targets(index, datum, CUSTOM_LOSS, several_targets=True)
    return PreparedLoss(CUSTOM_LOSS, {}, custom_arrays(program, datums), program)


@dataclass(frozen=True, slots=True)
class DatumResult:
    """The results of a datum: float32 logprobs in the targets' shape, loss, and metrics by `name:reduction`."""

    logprobs: NDArray[np.float32]
    loss: float
    metrics: Mapping[str, float]


def outcome_of(work: Work, loss: PreparedLoss, results: Sequence[DatumResult]) -> Outcome:
    """Build a call's outcome from the results of the datums, in order."""
    metrics = {"loss:sum": sum(result.loss for result in results)}
    tokens = sum(datum.length for datum in work.datums)
    for name in results[0].metrics:
        metrics[name] = _REDUCTIONS[name.partition(":")[2]]([result.metrics[name] for result in results])
    return Outcome(
        outputs=[{"logprobs": result.logprobs} for result in results],
        metrics=metrics | loss.standing_metrics(),
        trained_tokens=0 if work.forward_only else tokens,
        input_tokens=tokens,
    )


def _checked_config(spec: LossSpec, definition: _Definition) -> dict[str, float]:
    accepted = set(definition.config)
    for key, value in spec.config.items():
        if key not in accepted:
            known = f"its keys are {', '.join(sorted(accepted))}" if accepted else "it takes none"
            raise UserError(f"Unknown key {key!r} in loss_fn_config of {spec.name}: {known}.")
        if isinstance(value, str) or not math.isfinite(value):
            raise UserError(f"loss_fn_config[{key!r}] of {spec.name} must be a finite number, not {value!r}.")
    config = {key: float(spec.config.get(key, default)) for key, default in definition.config.items()}
    if LOW in config and config[LOW] > config[HIGH]:
        raise UserError(
            f"loss_fn_config of {spec.name} has {LOW} {config[LOW]} above {HIGH} {config[HIGH]}. "
            f"Both are bounds of the ratio, for example 0.8 and 1.2."
        )
    if config.get(KL_COEFF, 0.0) < 0:
        raise UserError(
            f"loss_fn_config['{KL_COEFF}'] of {spec.name} is {config[KL_COEFF]}, which would reward distance from the "
            "sampler without bound; it must be 0 or more."
        )
    return config


def _checked_inputs(
    index: int, datum: Datum, loss: str, definition: _Definition, config: Mapping[str, float]
) -> dict[str, NDArray[np.float32]]:
    _check_names(index, datum, loss, definition)
    targets = datum.loss_inputs[TARGETS]
    _check_targets(index, datum, loss, several_targets=definition.several_targets)
    arrays: dict[str, NDArray[np.float32]] = {}
    for name, given in datum.loss_inputs.items():
        if name == TARGETS:
            continue
        values = given.reshape(given.shape or 1)  # one value without a shape
        if values.shape != targets.shape:
            raise UserError(
                f"Datum {index}: {name} has shape {list(values.shape)}, {TARGETS} has {list(targets.shape)}; "
                f"they must be equal."
            )
        if not np.isfinite(values).all():
            raise UserError(f"Datum {index}: {name} holds NaN or infinity; every value must be finite.")
        arrays[name] = values.astype(np.float32, copy=False)
    return _completed(index, arrays, targets.shape, definition, config)


def _check_names(index: int, datum: Datum, loss: str, definition: _Definition) -> None:
    names = set(datum.loss_inputs)
    if missing := definition.required - names:
        raise UserError(f"Datum {index}: {loss} needs the input {', '.join(sorted(missing))}.")
    if unknown := names - definition.required - definition.optional:
        known = ", ".join(sorted(definition.required | definition.optional))
        raise UserError(
            f"Datum {index}: {loss} does not take the input {', '.join(sorted(unknown))}; it takes {known}."
        )


def _check_targets(index: int, datum: Datum, loss: str, *, several_targets: bool) -> None:
    shape = datum.loss_inputs[TARGETS].shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and not several_targets):
        raise UserError(f"Datum {index}: {TARGETS} of {loss} cannot have shape {list(shape)}; it needs [T].")
    if shape[0] != datum.length or 0 in shape[1:]:
        raise UserError(
            f"Datum {index}: {TARGETS} has shape {list(shape)}, model_input has {datum.length} tokens; "
            f"there must be one row of targets per token."
        )


def _completed(
    index: int,
    arrays: dict[str, NDArray[np.float32]],
    shape: tuple[int, ...],
    definition: _Definition,
    config: Mapping[str, float],
) -> dict[str, NDArray[np.float32]]:
    """Add optional inputs that a datum lacks, so that every row of a microbatch has the same inputs."""
    if "weights" in definition.optional:
        arrays.setdefault("weights", np.ones(shape, np.float32))
    if "sequence_ratio_mask" in definition.optional:
        arrays.setdefault("sequence_ratio_mask", (arrays["advantages"] != 0).astype(np.float32))
        _check_ratio_mask(index, arrays)
    if LOW in definition.optional:
        for name in (LOW, HIGH):
            arrays.setdefault(name, np.full(shape, config[name], np.float32))
        if (arrays[LOW] > arrays[HIGH]).any():
            raise UserError(f"Datum {index}: {LOW} is above {HIGH} for a token; both are bounds of the ratio.")
    return arrays


def _check_ratio_mask(index: int, arrays: LossArrays) -> None:
    mask = arrays["sequence_ratio_mask"]
    if (mask < 0).any() or (not mask.any() and arrays["advantages"].any()):
        raise UserError(
            f"Datum {index}: sequence_ratio_mask must be 1 for the tokens whose ratios are averaged "
            f"and 0 elsewhere; it is negative, or 0 everywhere."
        )
