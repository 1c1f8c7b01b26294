"""The factories of the built-in engines, and the factory of the built-in sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.engines.batching import DEFAULT_TOKEN_BUDGET
from tinsmith_trainer.engines.megatron.flags import MILES, NEMO_RL, MegatronSettings, rank_placement, rank_recompute
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.engines.peft.determinism import check_repeats, use_deterministic_algorithms
from tinsmith_trainer.engines.peft.settings import device_settings, plan_memory
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.builtin import BuiltinSampler, sampler_settings
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.kv_memory import kv_memory
from tinsmith_trainer.sampling.builtin.model_cache.choice import choose_forward
from tinsmith_trainer.torch_model.base_model import BaseModelInfo, model_directory
from tinsmith_trainer.torch_model.device import choose_device
from tinsmith_trainer.torch_model.loading import TorchModel, describe_model, load_torch_model
from tinsmith_trainer.torch_model.stored_weights import checked_config

if TYPE_CHECKING:  # these modules import Ray
    from tinsmith_trainer.engines.megatron.factory import RanksRequest
    from tinsmith_trainer.engines.megatron.rank_group import RankGroup


def build_colocated(options: WorkerOptions) -> tuple[Engine, Sampler | None]:
    """Load the base model once, for both the engine and the sampler.

    Raises ModelNotFound, ModelDirectoryInvalid, ServerError.
    """
    device, dtype = choose_device(options.device, options.dtype)
    numerics = options.numerics or device_settings(device, dtype).numerics
    is_trial_needed = numerics == "exact" and device != "cpu"
    if is_trial_needed:
        use_deterministic_algorithms()
    model = load_base_model(options)
    recompute = options.recompute or "auto"
    assert recompute != "mlp", "the flags are checked"
    plan = plan_memory(model, options.token_budget, recompute)
    defaults = device_settings(device, dtype, plan)
    settings = replace(
        defaults,
        numerics=numerics,
        adapter_slots=options.adapter_slots,
        max_rank=options.max_rank,
        lora_products=options.lora_products or defaults.lora_products,
        loss_kernel=options.loss_kernel or defaults.loss_kernel,
        map_stable_reinforce=options.map_stable_reinforce,
    )
    engine = build_peft_engine(model, settings)
    if is_trial_needed:
        check_repeats(engine)
    return engine, _sampler(model, options, alone=False) if options.sampling else None


def build_on_ranks(options: WorkerOptions) -> tuple[Engine, Sampler | None]:
    """Start ranks that hold the model, and a sampler with a separate copy of the model in this process.

    Raises the errors of `build_colocated`; ServerError also if ranks cannot start.
    """
    from tinsmith_trainer.engines.megatron.factory import RanksRequest, build_megatron_engine
    from tinsmith_trainer.engines.megatron.model.ranked_model import ranked_model
    from tinsmith_trainer.engines.miles.arguments import check_dense

    directory = model_directory(options.model, options.model_revision)
    info = describe_model(options.model, directory, checked_config(directory))
    placement = rank_placement(options.engine, options)
    on_gpus = placement.gpus_per_node > 0
    settings = MegatronSettings(
        numerics=options.numerics or ("fast" if on_gpus else "exact"),
        adapter_slots=options.adapter_slots,
        max_rank=options.max_rank,
        token_budget=options.token_budget or DEFAULT_TOKEN_BUDGET,
        recompute=rank_recompute(options.recompute, on_gpus=on_gpus),
        map_stable_reinforce=options.map_stable_reinforce,
    )
    request = RanksRequest(directory, _limited(info, options), placement, settings, options.hang_timeout_seconds)
    if options.engine == MILES:
        check_dense(ranked_model(request.directory, request.info, settings))
    engine = build_megatron_engine(options.engine, request, GPU_RANKS[options.engine])
    return engine, build_sampler(options)[1] if options.sampling else None


def _nemo_ranks(request: RanksRequest) -> tuple[RankGroup, torch.dtype]:
    from tinsmith_trainer.engines.nemo_rl.group import build_nemo_group

    return build_nemo_group(request), torch.bfloat16


def _miles_ranks(request: RanksRequest) -> tuple[RankGroup, torch.dtype]:
    from tinsmith_trainer.engines.miles.group import start_miles_ranks

    return start_miles_ranks(request)


GPU_RANKS = {NEMO_RL: _nemo_ranks, MILES: _miles_ranks}


def build_sampler(options: WorkerOptions) -> tuple[BaseModelInfo, Sampler]:
    """Load only the sampler. Raises the errors of `build_colocated`."""
    model = load_base_model(options)
    return model.info, _sampler(model, options, alone=options.role == "sampler")


def load_base_model(options: WorkerOptions) -> TorchModel:
    """Load the base model, with the limit on sequence length from the options.

    Raises ModelNotFound, ModelDirectoryInvalid, ServerError.
    """
    device, dtype = choose_device(options.device, options.dtype)
    model = load_torch_model(
        options.model,
        revision=options.model_revision,
        device=device,
        dtype=dtype,
        quantization=options.quantization,
    )
    model.info = _limited(model.info, options)
    return model


def _sampler(model: TorchModel, options: WorkerOptions, *, alone: bool) -> Sampler:
    forward = choose_forward(model)
    defaults = device_settings(model.device.type, model.model.dtype)
    settings = replace(
        sampler_settings(model.device.type, options.lora_products or defaults.lora_products),
        deterministic=options.deterministic_sampling,
    )
    sizes = forward.step_sizes(settings) if isinstance(forward, ForwardPass) else None
    context = model.info.max_sequence_length
    memory = kv_memory(forward.geometry, context, options.kv_cache_bytes, alone=alone, sizes=sizes)
    return BuiltinSampler(model, memory.within(settings), forward)


def _limited(info: BaseModelInfo, options: WorkerOptions) -> BaseModelInfo:
    limit, own = options.max_sequence_length, info.max_sequence_length
    if limit is None:
        return info
    if limit > own:
        raise ServerError(
            f"A maximum sequence length of {limit} is more than {info.path} was made for, "
            f"which is {own} tokens. Give {own} or less."
        )
    return replace(info, max_sequence_length=limit)
