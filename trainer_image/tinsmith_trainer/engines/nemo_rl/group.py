"""NeMo RL's workers as a rank group: the prepared model, a virtual cluster of GPUs, and a `Policy` on this cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from typing_extensions import override

from tinsmith_trainer.engines.megatron.factory import RanksRequest
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.model.ranked_model import check_no_code, ranked_model
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup, RanksLost, agreed
from tinsmith_trainer.engines.megatron.ray_cluster import SYSTEM_CONFIG, require_token, start_ray, stop_ray
from tinsmith_trainer.engines.megatron.ray_ranks import collect, start_error
from tinsmith_trainer.engines.nemo_rl.conversion import converted_model
from tinsmith_trainer.engines.nemo_rl.environment import check_driver, for_ranks, shared_with_ranks
from tinsmith_trainer.engines.nemo_rl.policy_config import Config, policy_config, starting_from
from tinsmith_trainer.errors import ServerError, TrainerError
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
WORKER = "tinsmith_trainer.engines.nemo_rl.actor.TinsmithMegatronWorker"
START, CALL, CALL_SHARDED = "ts_start", "ts_call", "ts_call_sharded"
"""The names of the worker's methods.

The names are constants because the driver cannot import the worker's class: the class needs Megatron, which the
driver's Python lacks.
"""

VENVS_VARIABLE = "NEMO_RL_VENV_DIR"
DEFAULT_VENVS = Path("/opt/ray_venvs")


class RankPythonMissing(TrainerError):
    """An error for an image without a prebuilt environment for Megatron workers."""


def rank_python(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the interpreter that NeMo RL's image has for Megatron workers.

    Tinsmith's workers only add a mixin.

    The interpreter is passed as a path. If NeMo RL gets a command that begins with `uv`, it builds a new environment
    from the network, which takes minutes (`_create_workers_from_bundle_indices` in
    `nemo_rl/distributed/worker_groups.py`). Raises RankPythonMissing.
    """
    python = Path(environment.get(VENVS_VARIABLE, DEFAULT_VENVS)) / STOCK_WORKER / "bin" / "python"
    if not python.exists():
        raise RankPythonMissing(
            f"{python} does not exist: this image has no built-in environment for NeMo RL's Megatron workers. "
            f"Build one as docs/how-to/nemo-rl.md says, or set {VENVS_VARIABLE} to where the environments are."
        )
    return python


def register(registry: MutableMapping[str, str], python: Path) -> None:
    """Register Tinsmith's worker.

    Call this before the creation of `Policy`, which raises ValueError for unknown classes.
    """
    registry[WORKER] = str(python)


@dataclass(frozen=True, slots=True)
class Prepared:
    """NeMo RL's `config` for the ranks, and the ranks' interpreter `python`."""

    config: Config
    python: Path


def prepare(
    directory: Path,
    info: BaseModelInfo,
    parallelism: Parallelism,
    settings: MegatronSettings,
    environment: Mapping[str, str] = os.environ,
) -> Prepared:
    """Check and convert the model. Raises ModelDirectoryInvalid, RankPythonMissing and ServerError."""
    check_no_code(directory, "NeMo RL")
    python = rank_python(environment)
    config = policy_config(ranked_model(directory, info, settings), parallelism)
    return Prepared(starting_from(config, converted_model(directory, info.revision, python, environment)), python)


log = structlog.get_logger(__name__)

DATA_AXIS = "data_parallel"
OTHER_AXES = ("pipeline_parallel", "context_parallel", "tensor_parallel")
"""The names of the other axes of `NamedSharding` in `Policy.__init__` (`nemo_rl/models/policy/lm_policy.py`)."""


def build_nemo_group(request: RanksRequest) -> RankGroup:
    """Start ranks, one rank on each GPU.

    The start takes minutes, because the first start with a model converts the model, unless a Job has converted it
    before.

    The conversion must be at the same path on every node. Raises ModelDirectoryInvalid, DriverEnvironmentInvalid or
    RankPythonMissing before Ray starts, and ServerError if the conversion, Ray or the workers fail.
    """
    check_driver(os.environ)
    placement = request.placement
    prepared = prepare(request.directory, request.info, placement.parallelism, request.settings)
    with shared_with_ranks(os.environ), _joined_ray(placement.ray_address) as folder:
        cluster, policy = _start(prepared, request.directory, placement.nodes, placement.gpus_per_node)
        group = NemoGroup(policy, cluster, placement.parallelism, ray_folder=folder)
        # `Policy` returns when Ray starts its workers. This waits until they are ready.
        group.start()
    return group


@contextmanager
def _joined_ray(address: str | None) -> Iterator[str | None]:
    """Connect to Ray, and disconnect if the creation of ranks fails. Raises ServerError."""
    where = "in this container" if address is None else f"at {address}"
    try:
        folder = _join_ray(address)
    except Exception as error:
        raise ServerError(f"Ray {where} does not answer: {type(error).__name__}: {error}") from error
    try:
        yield folder
    except Exception as error:
        stop_ray(folder)
        if isinstance(error, TrainerError):
            raise
        raise ServerError(f"NeMo RL's workers did not start: {type(error).__name__}: {error}") from error


def _join_ray(address: str | None) -> str | None:
    """Return the folder of the Ray cluster that this process started, or None if Ray was already running.

    NeMo RL's `init_ray` is not used, because `init_ray` connects to any cluster on the machine, or starts a cluster
    with a dashboard.
    """
    import ray

    if address is None:
        require_token()
    how: dict[str, Any] = {"log_to_driver": True, "runtime_env": {"env_vars": for_ranks(os.environ)}}
    if address is not None:
        ray.init(address=address, **how)
        return None
    how |= {"address": "local", "include_dashboard": False, "_system_config": dict(SYSTEM_CONFIG)}
    return start_ray(lambda folder: ray.init(_temp_dir=folder, **how))


def _start(prepared: Prepared, directory: Path, nodes: int, gpus_per_node: int) -> tuple[Any, Any]:
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.policy.lm_policy import Policy
    from transformers import AutoTokenizer

    register(ACTOR_ENVIRONMENT_REGISTRY, prepared.python)
    cluster = RayVirtualCluster(
        bundle_ct_per_node_list=[gpus_per_node] * nodes,
        use_gpus=True,
        num_gpus_per_node=gpus_per_node,
        max_colocated_worker_groups=1,  # more would assign a fraction of a GPU to each rank
        name="tinsmith",
    )
    policy = Policy(
        cluster=cluster,
        config=prepared.config,
        tokenizer=AutoTokenizer.from_pretrained(directory),
        name_prefix="tinsmith",
        init_optimizer=True,
        init_reference_model=False,  # it would be another copy of the model in host memory
        worker_extension_cls_fqn=WORKER,
    )
    return cluster, policy


class NemoGroup(RankGroup):
    """A group that owns `policy`, `cluster`, and the Ray cluster of `ray_folder`.

    The group converts errors of Ray and NeMo RL to RanksLost.
    """

    def __init__(self, policy: Any, cluster: Any, parallelism: Parallelism, *, ray_folder: str | None = None) -> None:
        self._policy = policy
        self._cluster = cluster
        self._parallelism = parallelism
        self._ray_folder = ray_folder
        self._closed = False

    @property
    @override
    def parallelism(self) -> Parallelism:
        return self._parallelism

    def start(self) -> None:
        """Build the ranks, before the first call. Raises TrainerError if a worker cannot become a rank."""
        workers = self._policy.worker_group
        try:
            collect(workers.run_all_workers_single_data(START, parallelism=self._parallelism))
        except RanksLost as lost:
            raise start_error(lost.__cause__) from lost

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        workers = self._policy.worker_group
        return agreed(collect(workers.run_all_workers_single_data(CALL, method=method, arguments=args)))

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        # No axis is declared to have equal outputs: NeMo RL would return the first pipeline stage's, not the last's.
        calls = self._policy.worker_group.run_all_workers_sharded_data(
            CALL_SHARDED,
            in_sharded_axes=[DATA_AXIS],
            replicate_on_axes=list(OTHER_AXES),
            common_kwargs={"method": method, "arguments": args},
            shard=list(shards),
        )
        values = agreed(collect(calls.futures))
        return [values[rank] for rank in self._parallelism.reporting_ranks()]

    @override
    def close(self) -> None:
        """End the ranks first, then release the GPUs, then disconnect from Ray.

        In another order, ranks would remain.
        """
        if self._closed:
            return
        self._closed = True
        self._policy.shutdown()
        self._cluster.shutdown()
        stop_ray(self._ray_folder)
