"""`MegatronTrainRayActor`: its constructor, and an `init` that leaves Megatron's own model and optimizer behind."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch.distributed
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.gpt_model import build_megatron_model, initialise_parallel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.step.optimizer import wrap_for_training

from miles.utils.ft_utils.indep_dp import IndepDPInfo


class MegatronTrainRayActor:
    def __init__(
        self,
        args: Namespace,
        *,
        world_size: int,
        rank: int,
        master_addr: str,
        master_port: int,
        indep_dp_store_addr: str | None,
        role: str,
        cell_index: int,
    ) -> None:
        assert (indep_dp_store_addr, role, cell_index) == (None, "actor", 0)
        self.args = args
        told = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port, "WORLD_SIZE": world_size, "RANK": rank}
        os.environ.update({name: str(value) for name, value in told.items()})

    def init(
        self,
        args: Namespace,
        role: str,
        *,
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        recv_ckpt_src_rank: int | None = None,
        indep_dp_info: IndepDPInfo,
    ) -> int:
        assert (with_ref, with_opd_teacher, recv_ckpt_src_rank, indep_dp_info.cell_index) == (False, False, None, 0)
        parallelism = Parallelism(
            int(os.environ["WORLD_SIZE"]),
            tensor=args.tensor_model_parallel_size,
            pipeline=args.pipeline_model_parallel_size,
            distributed_optimizer=args.use_distributed_optimizer,
        )
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
            initialise_parallel(parallelism, torch.distributed.get_rank())
        self.model, self.optimizer = _built(args, parallelism)
        assert _steps(args) > 0, "lr_decay_steps of the scheduler that Megatron would make"
        return 1


def _steps(args: Namespace) -> int:
    """Count steps as `get_optimizer_param_scheduler` (`miles/backends/megatron_utils/model.py`) does."""
    samples: int = args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt
    return samples // args.global_batch_size


def _built(args: Namespace, parallelism: Parallelism) -> tuple[list[Any], Any]:
    """Build the model as `_setup_lora_model_via_bridge` does: LoRA before DDP, without a setting for sums."""
    from megatron.bridge import AutoBridge

    from miles.backends.megatron_utils.lora_utils import create_lora_instance

    provider = AutoBridge.from_hf_pretrained(args.hf_checkpoint, trust_remote_code=True).to_megatron_provider(
        load_weights=False
    )
    provider.pipeline_model_parallel_size = args.pipeline_model_parallel_size
    provider.finalize()
    with cpu_megatron():
        chunk = build_megatron_model(Path(args.load), parallelism, max_rank=args.lora_rank).chunk
        chunk.config.calculate_per_token_loss = provider.calculate_per_token_loss
        lora = create_lora_instance(args)
        transformed = lora([chunk], training=True)
        lora.set_params_to_save(transformed)
        ddp, optimizer = wrap_for_training(transformed[0], distributed_optimizer=parallelism.distributed_optimizer)
    return [ddp], optimizer
