"""Ranks as Ray actors, one process per rank, on one or several machines: placement, calls, loss and end of ranks."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray
import structlog
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer, RankGroup, RanksLost, agreed, attempt
from tinsmith_trainer.errors import ServerError, TrainerError
from tinsmith_trainer.process.exit import end_process

log = structlog.get_logger(__name__)

PLACEMENT_SECONDS = 600.0
"""The time within which resources for all ranks must be reserved. The time includes the start of new nodes."""
PROGRESS_SECONDS = 120.0
"""If no rank becomes ready within this time, the log lists the missing ranks.

The load of a model may take any time.
"""

Resources = Mapping[str, float]
"""The resources of one rank, by the names that Ray uses."""

ON_CPUS: Resources = {"CPU": 1}
ON_GPUS: Resources = {"CPU": 1, "GPU": 1}


class RankProcess(ABC):
    """The class of a Ray actor.

    The actor is built in steps, because the first rank chooses the rendezvous for all ranks.
    """

    _rank: Any
    """The `Rank`, which exists after `join`."""

    @abstractmethod
    def prepare(self) -> None:
        """Do all slow work that needs no other rank. This work precedes the rendezvous."""

    @abstractmethod
    def host(self) -> tuple[str, int]:
        """Return the address and port of the rendezvous. The driver calls this on the first rank."""

    @abstractmethod
    def join(self, address: str, port: int) -> None:
        """Return when all ranks have joined and the model is built."""

    def ts_call(self, method: str, args: tuple[Any, ...]) -> Answer:
        """Call the method of `Rank` with this name, and return the result."""
        return attempt(lambda: getattr(self._rank, method)(*args))

    def ts_call_on_shard(self, method: str, shard: Any, args: tuple[Any, ...]) -> Answer:
        return self.ts_call(method, (shard, *args))


class RankPlacement:
    """The reserved resources of all ranks of a model, and the actors that use these resources."""

    def __init__(self, ranks: int, nodes: int, each: Resources = ON_CPUS) -> None:
        """Reserve all resources or none. Raises ServerError if Ray lacks these resources, and RayError."""
        self._ranks = ranks
        self._nodes = nodes
        self._each = each
        self._group = _reserve(ranks, nodes, each)
        self.actors: list[Any] = []

    def start(self, cls: type[RankProcess], *args: Any, environment: Mapping[str, str] | None = None) -> Any:
        """Start the next rank's actor.

        Nodes are filled in sequence, so that ranks with close numbers share a node.
        """
        bundle = len(self.actors) * self._nodes // self._ranks
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {"num_cpus": self._each["CPU"], "num_gpus": self._each.get("GPU", 0)}
        if environment is not None:
            options["runtime_env"] = {"env_vars": dict(environment)}
        actor = ray.remote(cls).options(max_restarts=0, scheduling_strategy=place, **options).remote(*args)
        self.actors.append(actor)
        return actor

    def meet(self) -> None:
        """Return when every rank has loaded a part of the model. Raises the RayError of the first rank that fails."""
        _until_all([actor.prepare.remote() for actor in self.actors], "are being prepared")
        [place] = _until_all([self.actors[0].host.remote()], "is looking for a place to meet")
        _until_all([actor.join.remote(*place) for actor in self.actors], "build the model")

    def close(self) -> None:
        """End the ranks, then release the resources; a release alone would not end the ranks.

        Idempotent.
        """
        with ExitStack() as closing:
            closing.callback(remove_placement_group, self._group)
            for actor in self.actors:
                closing.callback(ray.kill, actor)
            self.actors = []


def _until_all(calls: Sequence[Any], doing: str) -> list[Any]:
    """Wait for all calls.

    Raise the first failure immediately, because ranks may wait without end for a failed rank.
    """
    pending = list(calls)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=PROGRESS_SECONDS)
        ray.get(ready)
        if not ready:
            log.info(f"ranks {doing}", waiting_for=[rank for rank, call in enumerate(calls) if call in pending])
    return list(ray.get(list(calls)))


def _reserve(ranks: int, nodes: int, each: Resources) -> PlacementGroup:
    if ranks % nodes:
        raise ServerError(f"{ranks} ranks cannot be divided among {nodes} nodes; use a multiple.")
    strategy = "PACK" if nodes == 1 else "STRICT_SPREAD"
    bundle = {resource: count * (ranks // nodes) for resource, count in each.items()}
    places = placement_group([bundle] * nodes, strategy=strategy)
    try:
        ray.get(places.ready(), timeout=PLACEMENT_SECONDS)
    except GetTimeoutError:
        remove_placement_group(places)
        raise ServerError(_no_room(ranks, nodes, each)) from None
    return places


def _no_room(ranks: int, nodes: int, each: Resources) -> str:
    has = ray.cluster_resources()
    totals = ", ".join(f"{resource}s: {has.get(resource, 0):.0f}" for resource in each)
    return (
        f"Ray has no room for --ranks {ranks} on --nodes {nodes} after {PLACEMENT_SECONDS:.0f} s. Each needs a "
        f"{' and a '.join(each)}; Ray's nodes: {len(ray.nodes())}, {totals}."
    )


class RayRanks(RankGroup):
    """The ranks of a model as actors on the cluster to which this driver is connected. The group owns `places`."""

    def __init__(
        self,
        parallelism: Parallelism,
        places: RankPlacement,
        *,
        at_close: Callable[[], None] = lambda: None,
        late_seconds: float = math.inf,
    ) -> None:
        """Take ownership of ranks that are ready. `late_seconds`: see `collect`."""
        self._parallelism = parallelism
        self._late_seconds = late_seconds
        self._places = places
        self._at_close = at_close
        self._watch: RankWatch | None = RankWatch(places.actors)

    @property
    @override
    def parallelism(self) -> Parallelism:
        return self._parallelism

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        shared = ray.put(args)
        calls = [actor.ts_call.remote(method, shared) for actor in self._places.actors]
        return agreed(collect(calls, self._late_seconds))

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        data, shared = [ray.put(shard) for shard in shards], ray.put(args)
        calls = [
            actor.ts_call_on_shard.remote(method, data[self._parallelism.coordinates(rank).data], shared)
            for rank, actor in enumerate(self._places.actors)
        ]
        values = agreed(collect(calls, self._late_seconds))
        return [values[rank] for rank in self._parallelism.reporting_ranks()]

    @override
    def close(self) -> None:
        if self._watch is None:
            return
        self._watch.close()
        self._watch = None
        try:
            self._places.close()
        finally:
            self._at_close()


def start_ranks_on(
    parallelism: Parallelism,
    nodes: int,
    each: Resources,
    start: Callable[[RankPlacement], None],
    *,
    at_close: Callable[[], None] = lambda: None,
    late_seconds: float = math.inf,
) -> RayRanks:
    """Reserve resources, and start ranks with these resources. After a failure, clean up and call `at_close`.

    Raises ServerError if the cluster lacks resources, and the TrainerError of a rank.
    """
    places: RankPlacement | None = None
    try:
        places = RankPlacement(parallelism.world_size, nodes, each)
        start(places)
        return RayRanks(parallelism, places, at_close=at_close, late_seconds=late_seconds)
    except BaseException as error:
        _undo(places, at_close)
        if isinstance(error, RayError):
            raise start_error(error) from error
        raise


def _undo(places: RankPlacement | None, at_close: Callable[[], None]) -> None:
    """Clean up after a failed start.

    An error of the cleanup is not raised, because the error of the start is reported.
    """
    try:
        if places is not None:
            places.close()
    except Exception:
        log.exception("the ranks of a failed start could not be ended")
    finally:
        at_close()


GRACE_SECONDS = 10.0
"""The time to wait for the failures of other ranks after one rank's failure.

A rank without an answer after this time counts as a rank that waits for the failed rank.
"""


def collect(calls: Sequence[Any], late_seconds: float = math.inf) -> list[Answer]:
    """Return answers by rank.

    Raises RanksLost if a rank is dead, if ranks wait for a failed rank, or if a rank has not answered for
    `late_seconds` after the first answer. A stopped rank is not dead, and the others may not wait for it.
    """
    answers: dict[Any, Answer] = {}
    pending, give_up_at = list(calls), math.inf
    while pending:
        timeout = None if give_up_at == math.inf else max(0.0, give_up_at - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=timeout)
        if not ready:
            raise RanksLost(_why_given_up(calls, answers, late_seconds))
        answers[ready[0]] = _answer(ready[0])
        failed = answers[ready[0]].fault is not None
        give_up_at = min(give_up_at, time.monotonic() + (GRACE_SECONDS if failed else late_seconds))
    return [answers[call] for call in calls]


def _why_given_up(calls: Sequence[Any], answers: Mapping[Any, Answer], late_seconds: float) -> str:
    silent = [rank for rank, call in enumerate(calls) if call not in answers]
    for answer in answers.values():
        if answer.fault is not None:
            return f"{len(silent)} of {len(calls)} ranks do not answer because another one failed: {answer.message}"
    return (
        f"ranks {silent} of {len(calls)} have not answered for {late_seconds:g} s after the first answer, so they are "
        "stopped or hang"
    )


def _answer(call: Any) -> Answer:
    try:
        answer: Answer = ray.get(call)
    except RayError as error:
        raise RanksLost(f"A rank is gone: {error}") from error
    return answer


def start_error(error: BaseException | None) -> Exception:
    """Return the error of the rank if a rank caused the failure, otherwise the first line of Ray's error.

    The log has the whole text.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TrainerError):
        return cause
    log.error("the ranks did not start", error=str(error))
    first_line = str(cause).strip().splitlines()[:1] if cause else ["some failed, and others waited for them"]
    return ServerError(f"The ranks did not start: {''.join(first_line) or type(cause).__name__}")


EVERY_SECONDS = 1.0


def end_worker() -> None:
    """End the process.

    Call this inside the `except` block of the error that reports the loss. A new process starts new ranks.
    """
    end_process("a rank of the model is gone")


class RankWatch:
    """A thread that checks whether each actor is alive while no call is in progress.

    The watch finds a loss early, so that the next call usually finds a restarted worker. A busy rank answers a check
    only after the running call, so each rank has at most one pending check.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        on_lost: Callable[[], None] = end_worker,
        *,
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        """Start the thread. `on_lost` is called once, in the thread, inside the `except` block."""
        self._actors = actors
        self._on_lost = on_lost
        self._every_seconds = every_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Call this before ending the ranks on purpose. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        checks = [_ask(actor) for actor in self._actors]
        while not self._closed.wait(self._every_seconds):
            try:
                checks = [_renewed(actor, check) for actor, check in zip(self._actors, checks, strict=True)]
            except RayError:
                self._on_lost()
                return


def _renewed(actor: Any, check: Any) -> Any:
    """Return a new check if the last check was answered, otherwise the last check.

    Raises RayError if the check failed.
    """
    answered, _ = ray.wait([check], timeout=0)
    if not answered:
        return check
    ray.get(check)
    return _ask(actor)


def _ask(actor: Any) -> Any:
    """Ask an actor whether it is ready, with a method that every Ray actor has."""
    return actor.__ray_ready__.remote()
