"""NeMo RL's `PolicyConfig` for Tinsmith's ranks.

The configuration has every key, because a missing key raises KeyError in NeMo RL's code.

Keys and meanings come from `examples/configs/grpo_math_1B_megatron.yaml` and from the TypedDicts in
`nemo_rl/models/policy/__init__.py`, at the pinned commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinsmith_trainer.engines.megatron.batch import EXTRA_COLUMNS
from tinsmith_trainer.engines.megatron.model.ranked_model import RankedModel, check_layout
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.sharding import LOGPROB_CHUNK_TOKENS, length_multiple

PRECISION = "bfloat16"

Config = dict[str, Any]


def policy_config(model: RankedModel, parallelism: Parallelism) -> Config:
    """Return the configuration. Raises ModelDirectoryInvalid if ranks with this parallelism cannot hold the model."""
    check_layout(model, parallelism)
    multiple = length_multiple(tensor=parallelism.tensor, context=parallelism.context)
    length = -(-(model.max_tokens + EXTRA_COLUMNS) // multiple) * multiple
    packed_length = max(length, model.token_budget // multiple * multiple)
    packing = {
        "train_mb_tokens": packed_length,
        "logprob_mb_tokens": packed_length,
        "algorithm": "modified_first_fit_decreasing",
        "microbatch_order": "packer",
        "sequence_length_round": 64,
        "fuse_loss": False,  # its wrapper does not support logits, and arbitrary targets need logits
    }
    return {
        "model_name": str(model.directory),
        "tokenizer": {"name": str(model.directory), "chat_template_kwargs": None, "use_fastokens": False},
        "hf_config_overrides": {},
        "train_global_batch_size": parallelism.data,
        "train_micro_batch_size": 1,  # every call sets its own size
        "generation_batch_size": 1,
        "logprob_batch_size": 1,  # `Policy` asserts equality for 4 or more tensor ranks
        "logprob_chunk_size": LOGPROB_CHUNK_TOKENS,
        "max_total_sequence_length": length,
        "precision": PRECISION,
        "offload_optimizer_for_logprob": False,  # offloading frees gradient buffers without an error
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": _megatron(model, parallelism),
        "draft": {"enabled": False},
        "dynamic_batching": {
            "enabled": False,  # impossible with pipeline stages
            "train_mb_tokens": length,
            "logprob_mb_tokens": length,
            "sequence_length_round": 64,
        },
        # Only for context ranks, which need it: without packing a row's results do not depend on the other rows.
        "sequence_packing": {"enabled": parallelism.context > 1, **packing},
        "make_sequence_length_divisible_by": multiple,
        "max_grad_norm": 0.0,
        "optimizer": None,
        "scheduler": None,
        "generation": None,  # otherwise its temperature, top_p and top_k apply to the training logits
    }


def starting_from(config: Config, converted: Path) -> Config:
    """Add the folder of converted weights to the configuration.

    Without this folder, ranks would convert the weights themselves.
    """
    return {**config, "pretrained_checkpoint": {"format": "megatron_bridge", "path": str(converted)}}


def _megatron(model: RankedModel, parallelism: Parallelism) -> Config:
    return {
        "enabled": True,
        "model_overrides": {},
        "checkpoint": {"async_save": False, "ckpt_assume_constant_structure": True},
        "use_fused_linear_logprobs": False,  # it supports only the next tokens as targets; see `NemoSchedule`
        "fused_linear_logprobs_chunk_size": 256,
        "force_reconvert_from_hf": False,
        "empty_unused_memory_level": 0,  # no sampling engine shares these GPUs
        "activation_checkpointing": model.recompute != "none",
        "recompute_granularity": "full" if model.recompute == "layers" else "selective",
        "recompute_modules": None if model.recompute == "layers" else ["moe" if model.experts else "mlp"],
        "cuda_graph_impl": "none",
        "cuda_graph_modules": [],
        "cuda_graph_warmup_steps": 3,
        "fine_grained_activation_offloading": False,
        "offload_modules": None,
        "pipeline_dtype": PRECISION,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "gradient_accumulation_fusion": False,
        "use_fused_weighted_squared_relu": False,
        "defer_fp32_logits": True,  # required for logprobs in chunks
        "use_gloo_process_groups": False,
        "train_iters": 1_000_000,  # required, but unused
        "fp8_cfg": {"enabled": False, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False},
        "env_vars": None,
        **_layout(parallelism),
        **_no_loss_but_the_callers(),
        "peft": _peft(model),
        "optimizer": _optimizer(parallelism),
        "scheduler": _scheduler(),
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": True,
            # Our step itself reduces once per call, and gathers parameters when it switches adapters. With overlap,
            # either would happen in the next forward, on parameters of another adapter.
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
            "use_custom_fsdp": False,
            "data_parallel_sharding_strategy": "optim_grads_params",
        },
    }


def _layout(parallelism: Parallelism) -> Config:
    return {
        "tensor_model_parallel_size": parallelism.tensor,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": parallelism.expert,
        "pipeline_model_parallel_size": parallelism.pipeline,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "context_parallel_size": parallelism.context,
        "sequence_parallel": parallelism.tensor > 1,
    }


def _no_loss_but_the_callers() -> Config:
    """Disable the losses of routers and of heads for further tokens, because no client requested these losses."""
    return {
        "freeze_moe_router": True,
        "moe_router_dtype": "fp64",
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_permute_fusion": True,
        "moe_per_layer_logging": False,
        "moe_enable_deepep": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_overlap": False,
        "mtp_num_layers": 0,
        "mtp_loss_scaling_factor": 0.0,
        "mtp_use_repeated_layer": False,
        "mtp_detach_heads": False,
    }


def _peft(model: RankedModel) -> Config:
    """Return settings for the LoRA that `setup_model_and_optimizer` builds and `canonical_lora` replaces.

    The LoRA's targets are all modules that a client may train. The adapters of modules that are not trained stay zero.
    """
    return {
        "enabled": True,
        "target_modules": model.lora_targets,
        "exclude_modules": [],
        "dim": model.max_rank,
        "alpha": model.max_rank,  # a scale of 1 until an adapter is set
        "dropout": 0.0,
        "dropout_position": "pre",
        "lora_A_init_method": "xavier",
        "lora_B_init_method": "zero",
        "a2a_experimental": False,
        "lora_dtype": None,
    }


def _optimizer(parallelism: Parallelism) -> Config:
    """Return the optimizer's settings.

    The learning rate and decay in these settings are unused, because each step sets new values.
    """
    return {
        "optimizer": "adam",
        "lr": 1.0e-4,
        "min_lr": 0.0,
        "weight_decay": 0.0,
        "bf16": True,
        "fp16": False,
        "params_dtype": "float32",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-12,
        "sgd_momentum": 0.9,
        "use_distributed_optimizer": parallelism.distributed_optimizer,
        "use_precision_aware_optimizer": False,  # snapshots hold float32 masters and moments bit for bit
        "clip_grad": 0.0,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
        "overlap_cpu_optimizer_d2h_h2d": False,
    }


def _scheduler() -> Config:
    """Return a scheduler that is never stepped: a step would overwrite the learning rate and the weight decay."""
    return {
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.0,
        "weight_decay_incr_style": "constant",
        "lr_decay_style": "constant",
        "lr_decay_iters": 1000,
        "lr_warmup_iters": 0,
        "lr_warmup_init": 0.0,
    }
