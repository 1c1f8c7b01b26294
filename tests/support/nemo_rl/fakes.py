"""Modules of NeMo RL and Megatron-Bridge, as far as Tinsmith's code imports them, that compute on the CPU.

They do what `assumptions.toml` says their originals do, and no more.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from safetensors.torch import load_file, save
from torch import Tensor

_contexts: list[str] = []


@contextmanager
def temporary_distributed_context(backend: str) -> Iterator[None]:
    _contexts.append(backend)
    try:
        yield
    finally:
        _contexts.remove(backend)


@dataclass
class Provider:
    """A model's configuration, which also builds it."""

    directory: str
    load_weights: bool
    use_cpu_initialization: bool = False
    gradient_accumulation_fusion: bool = True
    finalized: bool = False

    def finalize(self) -> None:
        self.finalized = True

    def provide_distributed_model(self, *, wrap_with_ddp: bool, use_cpu_initialization: bool) -> list[Model]:
        assert _contexts == ["gloo"], "it would start NCCL"
        assert self.finalized
        assert self.load_weights
        assert not wrap_with_ddp, "there is no ddp_config"
        assert not self.gradient_accumulation_fusion, "there are no kernels for it"
        assert use_cpu_initialization, "it would allocate on a GPU"
        self.use_cpu_initialization = True
        return [Model(self)]


@dataclass
class Model:
    config: Provider


class AutoBridge:
    """A stand-in of AutoBridge, whose checkpoint holds the tensors under Hugging Face's names.

    The mapping of names is Megatron-Bridge's own business.
    """

    def __init__(self, directory: str) -> None:
        json.loads(Path(directory, "config.json").read_text())
        self._directory = directory

    @classmethod
    def from_hf_pretrained(cls, directory: str, *, trust_remote_code: bool) -> AutoBridge:
        assert not trust_remote_code
        assert not _contexts, "the Hugging Face model comes before the distributed state"
        return cls(directory)

    def to_megatron_provider(self, *, load_weights: bool) -> Provider:
        return Provider(self._directory, load_weights)

    def save_megatron_model(self, model: list[Model], path: str) -> None:
        assert _contexts == ["gloo"]
        torch.cuda.get_rng_state()
        torch.cuda.synchronize()
        torch.tensor([0], device=torch.cuda.current_device())
        [chunk] = model
        iteration = Path(path, "iter_0000000")
        iteration.mkdir()
        for shard in Path(self._directory).glob("*.safetensors"):
            (iteration / "__0_0.distcp").write_bytes(save(load_file(shard)))
        (iteration / "run_config.yaml").write_text(json.dumps(asdict(chunk.config)))
        Path(path, "latest_checkpointed_iteration.txt").write_text("0")


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"


class LossInputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"


def get_next_token_logprobs_from_logits(
    *,
    input_ids: Tensor,
    next_token_logits: Tensor,
    vocab_parallel_rank: int,
    vocab_parallel_group: Any,
    context_parallel_group: Any,
    chunk_size: int,
) -> Tensor:
    targets = input_ids.roll(-1, dims=-1)
    if parallel_state.model_parallel_is_initialized():
        next_token_logits = gather_from_tensor_model_parallel_region(next_token_logits)
    logprobs = torch.log_softmax(next_token_logits.float(), -1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[:, : input_ids.shape[1] - 1]


class BatchedDataDict(UserDict[str, Tensor]):
    bins: list[list[int]] | None = None

    def rows(self, index: list[int]) -> BatchedDataDict:
        return BatchedDataDict({name: column[index] for name, column in self.items()})

    def shard_by_batch_size(
        self, shards: int, *, sequence_packing_args: Mapping[str, Any]
    ) -> tuple[list[BatchedDataDict], list[int]]:
        """Longest first into the first bin with room."""
        multiple = sequence_packing_args["sequence_length_pad_multiple"]
        lengths = [
            -(-length // multiple) * multiple for length in self[sequence_packing_args["input_lengths_key"]].tolist()
        ]
        bins: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            for one in bins:
                if sum(lengths[i] for i in one) + lengths[row] <= sequence_packing_args["max_tokens_per_microbatch"]:
                    one.append(row)
                    break
            else:
                bins.append([row])
        order = [row for one in bins for row in one]
        packed = self.rows(order)
        starts = iter(range(len(order)))
        packed.bins = [[next(starts) for _ in one] for one in bins]
        assert shards == 1
        return [packed], order


@dataclass(frozen=True)
class Microbatch:
    data: BatchedDataDict
    packed: bool


def get_microbatch_iterator(
    data: BatchedDataDict, cfg: Mapping[str, Any], mbs: int, *, straggler_timer: Any
) -> tuple[Iterator[Microbatch], int, int, int, int]:
    length = data["input_ids"].shape[1]
    for column in data.values():
        assert column.ndim < 2 or column.shape[1] == length, "dimension 1 must be the sequence"
    packed = cfg["sequence_packing"]["enabled"]
    rows = len(data["input_ids"])
    if packed:
        assert data.bins is not None
        parts = data.bins
    else:
        parts = [list(range(start, start + mbs)) for start in range(0, rows - mbs + 1, mbs)]
    return (
        iter([Microbatch(data.rows(part), packed) for part in parts]),
        len(parts),
        1 if packed else mbs,
        length,
        length,
    )


Scored = tuple[Tensor, dict[str, Any]]


class LossPostProcessor:
    def __init__(self, *, loss_fn: Any, cfg: Mapping[str, Any], num_microbatches: int) -> None:
        assert not cfg["sequence_packing"]["fuse_loss"]
        self._loss = loss_fn
        self._count = num_microbatches

    def of(self, microbatch: Microbatch) -> Callable[[Tensor], Scored]:
        def scaled(logits: Tensor) -> Scored:
            score = self._by_sequence if microbatch.packed else self._together
            loss, metrics = score(logits, microbatch.data)
            return loss * self._count, metrics

        return scaled

    def _together(self, logits: Tensor, data: Mapping[str, Tensor]) -> Scored:
        counts = torch.tensor(1.0)
        if self._loss.input_type is LossInputType.LOGIT:
            return self._called(data, counts, logits=logits)
        logprobs = get_next_token_logprobs_from_logits(
            input_ids=data["input_ids"],
            next_token_logits=logits,
            vocab_parallel_rank=0,
            vocab_parallel_group=None,
            context_parallel_group=None,
            chunk_size=1,
        )
        return self._called(data, counts, next_token_logprobs=logprobs)

    def _called(self, data: Mapping[str, Tensor], counts: Tensor, **tensors: Tensor) -> Scored:
        found: Scored = self._loss(data=data, global_valid_seqs=counts, global_valid_toks=counts, **tensors)
        return found

    def _by_sequence(self, logits: Tensor, data: BatchedDataDict) -> Scored:
        """SequencePackingLossWrapper: sequences without padding, sums of losses and of metrics that begin with 0."""
        loss: Any = 0
        metrics: dict[str, Any] = {}
        for row, length in enumerate(data["input_lengths"].tolist()):
            one = {
                name: column[:, :length] if column.ndim > 1 and column.shape[1] > 1 else column
                for name, column in data.rows([row]).items()
            }
            row_loss, row_metrics = self._together(logits[row : row + 1, :length], one)
            loss = loss + row_loss
            for name, value in row_metrics.items():
                metrics[name] = metrics.get(name, 0)
                metrics[name] += value
        return loss, metrics


def megatron_forward_backward(
    *,
    model: Any,
    data_iterator: Iterator[Microbatch],
    num_microbatches: int,
    seq_length: int,
    mbs: int,
    post_processing_fn: LossPostProcessor,
    forward_only: bool,
    defer_fp32_logits: bool,
    straggler_timer: Any,
) -> list[dict[str, Any]]:
    def step(microbatches: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Scored]]:
        microbatch = next(microbatches)
        tokens = microbatch.data["input_ids"]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits: Tensor = chunk(input_ids=tokens, position_ids=positions, attention_mask=None)
        return logits, post_processing_fn.of(microbatch)

    if not hasattr(model, "config"):
        return [_alone(model, step, data_iterator, num_microbatches, forward_only) for _ in range(num_microbatches)]
    collected: list[dict[str, Any]] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=mbs,
        decoder_seq_length=seq_length,
        forward_only=forward_only,
    )
    return collected


def _alone(model: Any, step: Any, microbatches: Iterator[Microbatch], count: int, forward_only: bool) -> dict[str, Any]:
    """Compute a microbatch of a model that is not Megatron's, scaled as its schedules scale losses of two elements."""
    logits, score = step(microbatches, model)
    loss, metrics = score(logits)
    if not forward_only:
        (loss / count).backward()
    return metrics


def get_runtime_env_for_policy_worker(policy_worker_name: str) -> dict[str, Any]:
    return {}


class CanonicalLoRA:
    def __init__(self, *, target_modules: list[str], dim: int, alpha: int, dropout: float) -> None:
        self.target_modules = target_modules
        self.dim = dim
        self.alpha = alpha
        self.dropout = dropout

    def transform(self, m: Any, name: str | None = None, prefix: str | None = None) -> Any:
        """Dense layers are adapted by `bridge.adapted_by_bridge`."""
        return m


def stock_lora(**arguments: Any) -> Any:
    return SimpleNamespace(**arguments)


PEFT_ARGUMENTS: Mapping[str, Any] = {
    "target_modules": ["linear_q", "experts"],
    "exclude_modules": [],
    "dim": 8,
    "alpha": 8,
    "dropout": 0.0,
    "dropout_position": "pre",
    "lora_A_init_method": "xavier",
    "lora_B_init_method": "zero",
    "a2a_experimental": False,
    "lora_dtype": None,
}
"""The arguments that `setup_model_and_optimizer` gives to LoRA."""


def compile_helpers() -> None:
    """Compile nothing, as where the package belongs to another user, or the image has no compiler."""
    raise SystemExit(1)


class MegatronPolicyWorkerImpl:
    """Builds what a test hands it as `parts`, after the LoRA that its setup module makes."""

    def __init__(self, config: Mapping[str, Any], parts: Callable[[Any], Mapping[str, Any]]) -> None:
        sys.modules["megatron.bridge.training"].initialize.compile_helpers()  # type: ignore[attr-defined]
        setup: Any = sys.modules["nemo_rl.models.megatron"].setup  # type: ignore[attr-defined]
        self.cfg = config
        self.rank = 0
        self.mcore_state = SimpleNamespace(straggler_timer=None)
        self.defer_fp32_logits = True
        self.peft = setup.LoRA(**{name: config["megatron_cfg"]["peft"][name] for name in PEFT_ARGUMENTS})
        for name, value in parts(self.peft).items():
            setattr(self, name, value)


class RayVirtualCluster:
    created: ClassVar[list[RayVirtualCluster]] = []

    def __init__(
        self,
        *,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool,
        num_gpus_per_node: int,
        max_colocated_worker_groups: int,
        name: str,
    ) -> None:
        self.bundles = bundle_ct_per_node_list
        self.world_size = sum(bundle_ct_per_node_list)
        self.colocated = max_colocated_worker_groups
        self.closed = False
        RayVirtualCluster.created.append(self)

    def shutdown(self) -> bool:
        self.closed = True
        return True


class Policy:
    """`environment` is what it would have copied for its workers."""

    created: ClassVar[list[Policy]] = []
    group_of: ClassVar[Callable[[Policy], Any]] = SimpleNamespace

    def __init__(
        self,
        *,
        cluster: RayVirtualCluster,
        config: Mapping[str, Any],
        tokenizer: Any,
        name_prefix: str,
        init_optimizer: bool,
        init_reference_model: bool,
        worker_extension_cls_fqn: str,
    ) -> None:
        if worker_extension_cls_fqn not in ACTOR_ENVIRONMENT_REGISTRY:
            raise ValueError(f"No actor environment registered for {worker_extension_cls_fqn}.")
        converted = config["pretrained_checkpoint"]
        if converted["format"] != "megatron_bridge" or not Path(converted["path"], "run_config.yaml").exists():
            raise FileNotFoundError(f"{converted} is no checkpoint, and these stand-ins convert nothing")
        self.cluster = cluster
        self.config = config
        self.environment = dict(os.environ)
        self.init_reference_model = init_reference_model
        self.closed = False
        self.worker_group = Policy.group_of(self)
        Policy.created.append(self)

    def shutdown(self) -> bool:
        assert not self.cluster.closed, "workers go before their placement"
        self.closed = True
        return True


ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = {}

FAKES: Mapping[str, Mapping[str, Any]] = {
    "nemo_rl.algorithms.loss.interfaces": {"LossType": LossType, "LossInputType": LossInputType},
    "nemo_rl.distributed.batched_data_dict": {"BatchedDataDict": BatchedDataDict},
    "nemo_rl.distributed.model_utils": {"get_next_token_logprobs_from_logits": get_next_token_logprobs_from_logits},
    "nemo_rl.distributed.ray_actor_environment_registry": {"ACTOR_ENVIRONMENT_REGISTRY": ACTOR_ENVIRONMENT_REGISTRY},
    "nemo_rl.distributed.virtual_cluster": {"RayVirtualCluster": RayVirtualCluster},
    "nemo_rl.models.megatron.data": {"get_microbatch_iterator": get_microbatch_iterator},
    "nemo_rl.models.megatron.train": {
        "LossPostProcessor": LossPostProcessor,
        "megatron_forward_backward": megatron_forward_backward,
    },
    "nemo_rl.models.megatron": {"setup": ModuleType("nemo_rl.models.megatron.setup")},
    "nemo_rl.models.policy.lm_policy": {"Policy": Policy},
    "nemo_rl.models.policy.utils": {"get_runtime_env_for_policy_worker": get_runtime_env_for_policy_worker},
    "nemo_rl.models.policy.workers.megatron_policy_worker": {"MegatronPolicyWorkerImpl": MegatronPolicyWorkerImpl},
    "megatron.bridge": {"AutoBridge": AutoBridge},
    "megatron.bridge.peft.canonical_lora": {"CanonicalLoRA": CanonicalLoRA},
    "megatron.bridge.training": {"initialize": ModuleType("megatron.bridge.training.initialize")},
    "megatron.bridge.training.model_load_save": {"temporary_distributed_context": temporary_distributed_context},
}


def fake_modules() -> dict[str, ModuleType]:
    """Return new fake modules for `sys.modules`, and the packages above them that are not installed."""
    modules: dict[str, ModuleType] = {}
    for name, contents in FAKES.items():
        for depth in range(1, name.count(".") + 2):
            package = ".".join(name.split(".")[:depth])
            if package != "megatron":  # which is installed, without a bridge
                modules.setdefault(package, ModuleType(package))
        vars(modules[name]).update(contents)
    setup = modules["nemo_rl.models.megatron"].setup
    vars(setup)["LoRA"] = stock_lora
    modules[setup.__name__] = setup
    initialize = modules["megatron.bridge.training"].initialize
    vars(initialize)["compile_helpers"] = compile_helpers
    modules[initialize.__name__] = initialize
    return modules
