"""The driver of NeMo RL's workers: how they are made, called, lost and ended. NeMo RL and Ray are stand-ins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions
from ray.exceptions import RayActorError, RayTaskError
from support.nemo_rl.fakes import ACTOR_ENVIRONMENT_REGISTRY, Policy, RayVirtualCluster
from support.nemo_rl.rank_python import conversions_begun, write_rank_python
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.megatron import ray_cluster, ray_ranks
from tinsmith_trainer.engines.megatron.factory import RanksRequest
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankPlacement
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer, RanksFailed, RanksLost
from tinsmith_trainer.engines.nemo_rl.environment import DriverEnvironmentInvalid
from tinsmith_trainer.engines.nemo_rl.group import STOCK_WORKER, WORKER, NemoGroup, build_nemo_group
from tinsmith_trainer.errors import ModelDirectoryInvalid, ServerError, TrainerError, UserError

SILENCE = object()
"""What a rank does that waits in a collective for one that is gone."""

Behaviour = Callable[[int, Mapping[str, Any]], Any]
"""Of a rank and what it was called with: a value, an exception to raise, or SILENCE."""


@dataclass(frozen=True)
class Future:
    rank: int
    outcome: Any


class FakeRay:
    """`wait` gives what is ready one by one, and gives up at once where a timeout is set."""

    exceptions = exceptions

    def __init__(self) -> None:
        self.joined: dict[str, Any] = {}
        self.is_shut_down = False

    def init(self, **arguments: Any) -> None:
        self.joined = arguments

    def shutdown(self) -> None:
        self.is_shut_down = True

    def wait(
        self, pending: list[Future], *, num_returns: int, timeout: float | None
    ) -> tuple[list[Future], list[Future]]:
        ready = [future for future in pending if future.outcome is not SILENCE][:num_returns]
        assert ready or timeout is not None, "the driver would never return"
        return ready, [future for future in pending if future not in ready]

    def get(self, future: Future) -> Any:
        if isinstance(future.outcome, Exception):
            raise future.outcome
        return future.outcome


@dataclass
class FakeWorkerGroup:
    """`RayWorkerGroup`'s two ways to call all workers: by keyword alone."""

    parallelism: Parallelism
    behaviour: Behaviour
    calls: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)

    def run_all_workers_single_data(self, method_name: str, *args: Any, **kwargs: Any) -> list[Future]:
        assert not args, "will fail with args under certain circumstances"
        return [self._call(rank, method_name, kwargs) for rank in range(self.parallelism.world_size)]

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str],
        common_kwargs: Mapping[str, Any],
        **kwargs: Sequence[Any],
    ) -> SimpleNamespace:
        assert not args
        assert [*in_sharded_axes, *sorted(replicate_on_axes)] == [
            "data_parallel",
            "context_parallel",
            "pipeline_parallel",
            "tensor_parallel",
        ]
        futures = []
        for rank in range(self.parallelism.world_size):
            at = self.parallelism.coordinates(rank).data
            own = {name: parts[at] for name, parts in kwargs.items()}
            futures.append(self._call(rank, method_name, {**own, **common_kwargs}))
        return SimpleNamespace(futures=futures)

    def _call(self, rank: int, method: str, arguments: dict[str, Any]) -> Future:
        self.calls.append((rank, method, arguments))
        outcome = self.behaviour(rank, arguments)
        ready = isinstance(outcome, (Exception, Answer)) or outcome is SILENCE
        return Future(rank, outcome if ready else Answer(outcome))


WHAT_A_DRIVER_IMPORTS = """
import tinsmith_trainer.engines.nemo_rl.group, tinsmith_trainer.engines.megatron.engine
"""

LAYOUT = Parallelism(8, tensor=2, pipeline=2)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    stand_in: Any = FakeRay()
    monkeypatch.setattr(ray_cluster, "RAY_FOLDER", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setattr(ray_ranks, "ray", stand_in)
    found: FakeRay = stand_in
    return found


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Prepare the driver's view of NeMo RL's image, with a secret. Ray's variables are removed after the test."""
    for name, value in {
        "TORCH_CUDA_ARCH_LIST": "9.0 10.0",
        **write_rank_python(tmp_path / "venvs"),
        "NRL_MEGATRON_CHECKPOINT_DIR": str(tmp_path / "converted"),
        "AWS_SECRET_ACCESS_KEY": "secret",
        "RAY_AUTH_MODE": "",
        "RAY_AUTH_TOKEN": "",
    }.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    Policy.group_of = SimpleNamespace  # type: ignore[assignment]


def echo(rank: int, arguments: Any) -> Any:
    return rank, arguments.get("shard"), arguments.get("method"), arguments.get("arguments")


def group(behaviour: Behaviour, parallelism: Parallelism = LAYOUT) -> NemoGroup:
    policy = SimpleNamespace(worker_group=FakeWorkerGroup(parallelism, behaviour))
    return NemoGroup(policy, None, parallelism)


def as_ray_raises(error: Exception) -> RayTaskError:
    return RayTaskError("ts_start", "traceback", error, proctitle="a rank", pid=1, ip="::1")


def build(ray_address: str | None = None, parallelism: Parallelism = LAYOUT, behaviour: Behaviour = echo) -> Any:
    Policy.group_of = lambda _policy: FakeWorkerGroup(parallelism, behaviour)  # type: ignore[assignment]
    model = tiny_model("qwen3")
    wanted = RankPlacement(parallelism, in_process=False, nodes=2, gpus_per_node=4, ray_address=ray_address)
    return build_nemo_group(RanksRequest(model.directory, model.info, wanted, MegatronSettings(max_rank=16)))


@pytest.mark.usefixtures("fake_nemo_rl")
def test_each_rank_gets_its_own_gpu_and_our_class_under_the_prepared_python(ray: FakeRay, image: Path) -> None:
    build("auto")
    [policy], [cluster] = Policy.created, RayVirtualCluster.created
    assert (cluster.bundles, cluster.colocated) == ([4, 4], 1)
    assert {WORKER: str(image / "venvs" / STOCK_WORKER / "bin" / "python")} == ACTOR_ENVIRONMENT_REGISTRY
    assert not policy.init_reference_model
    assert policy.config["megatron_cfg"]["peft"]["dim"] == 16
    assert {call[1] for call in policy.worker_group.calls} == {"ts_start"}
    assert ray.joined["address"] == "auto"


@pytest.mark.usefixtures("fake_nemo_rl")
def test_secrets_of_the_driver_reach_neither_workers_nor_ray_and_it_keeps_them(
    ray: FakeRay, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    build()
    [policy] = Policy.created
    assert "AWS_SECRET_ACCESS_KEY" not in policy.environment
    assert "AWS_SECRET_ACCESS_KEY" not in ray.joined["runtime_env"]["env_vars"]
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "secret"
    assert policy.environment["TORCH_CUDA_ARCH_LIST"] == "9.0 10.0"


@pytest.mark.usefixtures("fake_nemo_rl")
def test_an_impossible_setting_is_refused_before_conversion_and_ray(
    ray: FakeRay, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelDirectoryInvalid, match="has no experts, which 2 ranks"):
        build(parallelism=Parallelism(8, expert=2))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    with pytest.raises(DriverEnvironmentInvalid):
        build()
    assert ray.joined == {}
    assert conversions_begun(image / "converted") == []


@pytest.mark.usefixtures("fake_nemo_rl", "image")
def test_a_ray_that_does_not_answer_is_named(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ray(**_arguments: Any) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(ray, "init", no_ray)
    with pytest.raises(ServerError, match="Ray at head:6379 does not answer: ConnectionError"):
        build("head:6379")


@pytest.mark.usefixtures("fake_nemo_rl", "image")
def test_a_ray_that_was_too_slow_to_start_is_started_once_more_and_its_folder_goes_with_the_ranks(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []

    def too_slow_at_first(**arguments: Any) -> None:
        folders.append(Path(arguments["_temp_dir"]))
        if len(folders) == 1:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", too_slow_at_first)
    ranks = build()
    assert [folder.exists() for folder in folders] == [False, True]
    ranks.close()
    assert not folders[1].exists()


@pytest.mark.usefixtures("ray")
def test_a_shard_reaches_all_ranks_of_its_data_index_and_the_last_stage_answers() -> None:
    """Ranks are numbered by stage, data index, tensor index; the last stage's first tensor ranks report."""
    ranks = group(echo)
    found = ranks.sharded("ts_forward_backward", ["first", "second"], "a")
    assert [(rank, shard) for rank, shard, _, _ in found] == [(4, "first"), (6, "second")]
    workers: FakeWorkerGroup = ranks._policy.worker_group
    shards = [arguments["shard"] for _, _, arguments in workers.calls]
    assert shards == ["first", "first", "second", "second"] * 2


@pytest.mark.usefixtures("ray")
def test_a_dead_worker_is_a_lost_rank_though_the_others_wait_for_it() -> None:
    ranks = group(lambda rank, _: RayActorError(error_msg="the GPU fell off the bus") if rank == 3 else SILENCE)
    with pytest.raises(RanksLost, match="the GPU fell off the bus"):
        ranks.all("ts_optim_step", "a")


@pytest.mark.usefixtures("ray")
def test_ranks_that_wait_for_a_failed_rank_are_lost() -> None:
    ranks = group(lambda rank, _: Answer(fault="computation", message="out of memory") if rank == 0 else SILENCE)
    with pytest.raises(RanksLost):
        ranks.all("ts_optim_step", "a")


@pytest.mark.usefixtures("ray")
def test_the_same_failure_of_all_ranks_leaves_them_alive() -> None:
    with pytest.raises(RanksFailed, match="out of memory"):
        group(lambda *_: Answer(fault="computation", message="out of memory")).all("ts_optim_step", "a")
    with pytest.raises(UserError, match="not finite"):
        group(lambda *_: Answer(fault="user", message="not finite")).all("ts_optim_step", "a")


@pytest.mark.usefixtures("ray")
def test_a_worker_that_cannot_be_a_rank_says_why_in_its_own_words() -> None:
    why = ModelDirectoryInvalid("The model has a linear layer without a name.")
    ranks = group(lambda *_: as_ray_raises(why))
    with pytest.raises(ModelDirectoryInvalid, match="without a name"):
        ranks.start()


@pytest.mark.usefixtures("fake_nemo_rl")
def test_workers_end_before_their_places_and_those_before_ray_once(ray: FakeRay, image: Path) -> None:
    """The stand-in of Policy fails where its cluster is gone already."""
    ranks = build()
    ranks.close()
    ranks.close()
    [policy], [cluster] = Policy.created, RayVirtualCluster.created
    assert policy.closed
    assert cluster.closed
    assert ray.is_shut_down


@pytest.mark.timeout(120)  # a new Python imports PyTorch and transformers
@pytest.mark.slow("imports an engine in a process of its own")
def test_the_driver_needs_no_megatron() -> None:
    """NeMo RL's image has it in the ranks' environment alone."""
    imported = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['megatron'] = None\n" + WHAT_A_DRIVER_IMPORTS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert imported.returncode == 0, imported.stderr


@pytest.mark.usefixtures("fake_nemo_rl", "image")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("no GPU is free"), "NeMo RL's workers did not start: RuntimeError: no GPU is free"),
        (UserError("tensor=2 does not divide"), "tensor=2 does not divide"),
    ],
    ids=["foreign", "own"],
)
def test_ray_ends_with_workers_that_did_not_start(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    folders = []

    def fail(*_arguments: Any, **_named: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", lambda **arguments: folders.append(Path(arguments["_temp_dir"])))
    monkeypatch.setattr(Policy, "__init__", fail)
    with pytest.raises(TrainerError, match=message):
        build()
    assert [folder.exists() for folder in folders] == [False]
