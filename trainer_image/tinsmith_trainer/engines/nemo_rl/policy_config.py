"""NeMo RL's `PolicyConfig` for our ranks: every key, since a missing one is a KeyError deep inside.

Keys and their meaning are those of `examples/configs/grpo_math_1B_megatron.yaml` and of the TypedDicts in
`nemo_rl/models/policy/__init__.py` at the pinned commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_trainer.engines.megatron.batches.alignment import EXTRA_COLUMNS
from tinsmith_trainer.engines.megatron.batches.sharding import LOGPROB_CHUNK_TOKENS, length_multiple
from tinsmith_trainer.engines.megatron.flags import RankRecompute
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.errors import ModelDirectoryInvalid

PRECISION = "bfloat16"

GROUPED_ROW_FLOATS = 8
"""In bfloat16, 16 bytes: grouped products of GPUs refuse rows that are no multiple of it."""

EXPERTS = "experts"
_ATTENTION = ("linear_q", "linear_k", "linear_v", "linear_proj")
_FEED_FORWARD = ("linear_fc1_gate", "linear_fc1_up", "linear_fc2")
_UNEMBEDDING = ("output_layer",)

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NemoModel:
    """What ranks are made for.

    `max_tokens` is the longest datum's, `max_rank` the highest rank of an adapter, `token_budget` how many tokens a
    packed microbatch may have, or those of a longest datum if that is more, `recompute` what of each layer is
    computed again in backward. `experts`: of each layer of a mixture; 0 of a dense model.
    """

    directory: Path
    vocab_size: int
    kv_heads: int
    tied_embeddings: bool
    max_rank: int
    max_tokens: int
    token_budget: int
    recompute: RankRecompute = "layers"
    experts: int = 0


def policy_config(model: NemoModel, parallelism: Parallelism) -> Config:
    """Raises ModelDirectoryInvalid where such ranks could not hold such a model."""
    _check(model, parallelism)
    multiple = length_multiple(tensor=parallelism.tensor, context=parallelism.context)
    length = -(-(model.max_tokens + EXTRA_COLUMNS) // multiple) * multiple
    packed_length = max(length, model.token_budget // multiple * multiple)
    packing = {
        "train_mb_tokens": packed_length,
        "logprob_mb_tokens": packed_length,
        "algorithm": "modified_first_fit_decreasing",
        "microbatch_order": "packer",
        "sequence_length_round": 64,
        "fuse_loss": False,  # its wrapper knows no logits, which targets of the caller's choice need
    }
    return {
        "model_name": str(model.directory),
        "tokenizer": {"name": str(model.directory), "chat_template_kwargs": None, "use_fastokens": False},
        "hf_config_overrides": {},
        "train_global_batch_size": parallelism.data,
        "train_micro_batch_size": 1,  # every call brings its own
        "generation_batch_size": 1,
        "logprob_batch_size": 1,  # equal: with 4 or more tensor ranks `Policy` asserts it
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
        # Only where it must be, for context ranks: without it a rank's results do not depend on its rows' company.
        "sequence_packing": {"enabled": parallelism.context > 1, **packing},
        "make_sequence_length_divisible_by": multiple,
        "max_grad_norm": 0.0,
        "optimizer": None,
        "scheduler": None,
        "generation": None,  # else its temperature, top_p and top_k are applied to the training logits
    }


def starting_from(config: Config, converted: Path) -> Config:
    """With the weights in `converted`, a folder of Megatron-Bridge's. Without this ranks would convert them."""
    return {**config, "pretrained_checkpoint": {"format": "megatron_bridge", "path": str(converted)}}


def _check(model: NemoModel, parallelism: Parallelism) -> None:
    if parallelism.expert > 1 and (not model.experts or model.experts % parallelism.expert):
        raise ModelDirectoryInvalid(
            f"The model in {model.directory} has {model.experts or 'no'} experts, which {parallelism.expert} ranks "
            f"cannot share equally. Choose an expert parallelism that divides them; of a dense model that is 1."
        )
    if model.experts and model.max_rank % GROUPED_ROW_FLOATS:
        raise ModelDirectoryInvalid(
            f"Adapters of experts are multiplied by rows of {GROUPED_ROW_FLOATS} numbers, and the highest rank is "
            f"{model.max_rank}. Choose a multiple of {GROUPED_ROW_FLOATS}: smaller ranks are padded to it."
        )
    shared = {
        "key and value heads": model.kv_heads,
        "tokens in its vocabulary": model.vocab_size,  # Megatron-Bridge pads none of a transformers model's
        "rows of LoRA's A at the highest rank": model.max_rank,
    }
    for what, count in shared.items():
        if count % parallelism.tensor:
            raise ModelDirectoryInvalid(
                f"The model in {model.directory} has {count} {what}, which {parallelism.tensor} tensor ranks cannot "
                f"share equally. Choose a number of tensor ranks that divides {count}."
            )
    if model.tied_embeddings and parallelism.pipeline > 1:
        # The last stage takes its unembedding from `LoRALinear.weight`, which has the adapter in it already, and
        # adds the adapter to what comes out (`megatron/bridge/peft/lora_layers.py`).
        raise ModelDirectoryInvalid(
            f"The model in {model.directory} unembeds by its embeddings, which pipeline stages would adapt twice. "
            f"Use 1 pipeline stage: models that share these weights are small enough for tensor ranks alone."
        )


def _megatron(model: NemoModel, parallelism: Parallelism) -> Config:
    return {
        "enabled": True,
        "model_overrides": {},
        "checkpoint": {"async_save": False, "ckpt_assume_constant_structure": True},
        "use_fused_linear_logprobs": False,  # it knows no targets but the tokens after; see `NemoSchedule`
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
        "defer_fp32_logits": True,  # asserted where logprobs are computed in chunks
        "use_gloo_process_groups": False,
        "train_iters": 1_000_000,  # asserted to be there; nothing of ours counts them
        "fp8_cfg": {"enabled": False, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False},
        "env_vars": None,
        **_layout(parallelism),
        **_no_loss_but_the_callers(),
        "peft": _peft(model),
        "optimizer": _optimizer(parallelism),
        "scheduler": _scheduler(),
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": True,
            # Our step reduces once per call itself, and gathers parameters when it switches adapters: with overlap
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
    """Routers and further prediction heads bring losses of their own, whose gradients nobody asked for."""
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


def _peft(model: NemoModel) -> Config:
    """What `setup_model_and_optimizer` builds its LoRA from; `canonical_lora` has it build another one.

    All that a client may ask to train is a target; what it does not is zero, and stays so.
    """
    return {
        "enabled": True,
        "target_modules": [*_ATTENTION, *((EXPERTS,) if model.experts else _FEED_FORWARD), *_UNEMBEDDING],
        "exclude_modules": [],
        "dim": model.max_rank,
        "alpha": model.max_rank,  # a scale of 1, until an adapter is switched in
        "dropout": 0.0,
        "dropout_position": "pre",
        "lora_A_init_method": "xavier",
        "lora_B_init_method": "zero",
        "a2a_experimental": False,
        "lora_dtype": None,
    }


def _optimizer(parallelism: Parallelism) -> Config:
    """Learning rate and the like come with every step; what stands here is never used."""
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
        "use_precision_aware_optimizer": False,  # float32 masters and moments, which snapshots hold bit for bit
        "clip_grad": 0.0,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
        "overlap_cpu_optimizer_d2h_h2d": False,
    }


def _scheduler() -> Config:
    """Never stepped: it would overwrite each step's learning rate and weight decay."""
    return {
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.0,
        "weight_decay_incr_style": "constant",
        "lr_decay_style": "constant",
        "lr_decay_iters": 1000,
        "lr_warmup_iters": 0,
        "lr_warmup_init": 0.0,
    }
