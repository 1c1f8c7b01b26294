"""Ranks that are Ray's actors, one process each, on one machine or many: their places, their calls, their end."""

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
"""How long all places for ranks may take to be free, nodes that are still to come included."""
PROGRESS_SECONDS = 120.0
"""After this long without a rank that is ready, the log has which are missing. How long a model takes, nobody knows."""

Resources = Mapping[str, float]
"""Of one rank, in Ray's words."""

ON_CPUS: Resources = {"CPU": 1}
ON_GPUS: Resources = {"CPU": 1, "GPU": 1}


class RankProcess(ABC):
    """What Ray makes an actor of. Built in steps: the first rank must know where all meet before others can come."""

    _rank: Any
    """A `Rank`, once it has joined."""

    @abstractmethod
    def prepare(self) -> None:
        """All that takes long and needs no other rank, before a meeting is set."""

    @abstractmethod
    def host(self) -> tuple[str, int]:
        """Of the first rank: the address and port where all meet."""

    @abstractmethod
    def join(self, address: str, port: int) -> None:
        """Returns when all ranks have come and the model is built."""

    def ts_call(self, method: str, args: tuple[Any, ...]) -> Answer:
        """What came of `Rank`'s method of that name."""
        return attempt(lambda: getattr(self._rank, method)(*args))

    def ts_call_on_shard(self, method: str, shard: Any, args: tuple[Any, ...]) -> Answer:
        return self.ts_call(method, (shard, *args))


class RankPlacement:
    """Room for all ranks of a model or for none, since half a model would wait for ever, and the actors there."""

    def __init__(self, ranks: int, nodes: int, each: Resources = ON_CPUS) -> None:
        """Raises ServerError where Ray has no such room, and RayError."""
        self._ranks = ranks
        self._nodes = nodes
        self._each = each
        self._group = _reserve(ranks, nodes, each)
        self.actors: list[Any] = []

    def start(self, cls: type[RankProcess], *args: Any, environment: Mapping[str, str] | None = None) -> Any:
        """The next rank's actor. Ranks in their order fill one node after the other: who talk most are neighbours."""
        bundle = len(self.actors) * self._nodes // self._ranks
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {"num_cpus": self._each["CPU"], "num_gpus": self._each.get("GPU", 0)}
        if environment is not None:
            options["runtime_env"] = {"env_vars": dict(environment)}
        actor = ray.remote(cls).options(max_restarts=0, scheduling_strategy=place, **options).remote(*args)
        self.actors.append(actor)
        return actor

    def meet(self) -> None:
        """Returns when every rank has its part of the model. Raises RayError of the first that fails."""
        _until_all([actor.prepare.remote() for actor in self.actors], "are being prepared")
        [place] = _until_all([self.actors[0].host.remote()], "is looking for a place to meet")
        _until_all([actor.join.remote(*place) for actor in self.actors], "build the model")

    def close(self) -> None:
        """Ranks first: the other way round leaves them behind. Idempotent. What fails keeps nothing else from it."""
        with ExitStack() as closing:
            closing.callback(remove_placement_group, self._group)
            for actor in self.actors:
                closing.callback(ray.kill, actor)
            self.actors = []


def _until_all(calls: Sequence[Any], doing: str) -> list[Any]:
    """Raises at the first that fails, for which the others may wait in vain."""
    pending = list(calls)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=PROGRESS_SECONDS)
        ray.get(ready)
        if not ready:
            log.info(f"ranks {doing}", waiting_for=[rank for rank, call in enumerate(calls) if call in pending])
    return list(ray.get(list(calls)))


def _reserve(ranks: int, nodes: int, each: Resources) -> PlacementGroup:
    if ranks % nodes:
        raise ServerError(f"{ranks} ranks do not divide into {nodes} nodes; give a multiple.")
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
    theirs = ", ".join(f"their {resource}s: {has.get(resource, 0):.0f}" for resource in each)
    return (
        f"Ray has no room for --ranks {ranks} on --nodes {nodes} after {PLACEMENT_SECONDS:.0f} s. Each needs a "
        f"{' and a '.join(each)}; Ray's nodes: {len(ray.nodes())}, {theirs}."
    )


class RayRanks(RankGroup):
    """Actors of the cluster that this process is the driver of, all of them or none. `places` belong to it."""

    def __init__(
        self, parallelism: Parallelism, places: RankPlacement, *, at_close: Callable[[], None] = lambda: None
    ) -> None:
        """All ranks of `places` are ready to be called."""
        self._parallelism = parallelism
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
        return agreed(collect([actor.ts_call.remote(method, shared) for actor in self._places.actors]))

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        data, shared = [ray.put(shard) for shard in shards], ray.put(args)
        calls = [
            actor.ts_call_on_shard.remote(method, data[self._parallelism.coordinates(rank).data], shared)
            for rank, actor in enumerate(self._places.actors)
        ]
        values = agreed(collect(calls))
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
) -> RayRanks:
    """Ranks that `start` makes on places that are there, or nothing is left of them, and `at_close` was called.

    Raises ServerError where there is no room, and a rank's own TrainerError.
    """
    places: RankPlacement | None = None
    try:
        places = RankPlacement(parallelism.world_size, nodes, each)
        start(places)
        return RayRanks(parallelism, places, at_close=at_close)
    except BaseException as error:
        _undo(places, at_close)
        if isinstance(error, RayError):
            raise start_error(error) from error
        raise


def _undo(places: RankPlacement | None, at_close: Callable[[], None]) -> None:
    """The start's own error is the one that counts."""
    try:
        if places is not None:
            places.close()
    except Exception:
        log.exception("ranks that did not start could not be ended")
    finally:
        at_close()


GRACE_SECONDS = 10.0
"""How long the others may take to fail as well once one has: then they are waiting for it in vain."""


def collect(calls: Sequence[Any]) -> list[Answer]:
    """By rank. Raises RanksLost as soon as one is known to be dead, or to have failed where others wait for it."""
    answers: dict[Any, Answer] = {}
    pending, give_up_at = list(calls), math.inf
    while pending:
        timeout = None if give_up_at == math.inf else max(0.0, give_up_at - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=timeout)
        if not ready:
            why = next(answer.message for answer in answers.values() if answer.fault is not None)
            raise RanksLost(f"{len(pending)} of {len(calls)} ranks do not answer, since another one failed: {why}")
        answers[ready[0]] = _answer(ready[0])
        if answers[ready[0]].fault is not None:
            give_up_at = min(give_up_at, time.monotonic() + GRACE_SECONDS)
    return [answers[call] for call in calls]


def _answer(call: Any) -> Answer:
    try:
        answer: Answer = ray.get(call)
    except RayError as error:
        raise RanksLost(f"A rank is gone: {error}") from error
    return answer


def start_error(error: BaseException | None) -> Exception:
    """A rank's own sentence on what is wrong with the model, where it has one; else Ray's first, and all in the log."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TrainerError):
        return cause
    log.error("ranks did not start", error=str(error))
    said = str(cause).strip().splitlines()[:1] if cause else ["some failed, and others waited for them in vain"]
    return ServerError(f"The ranks did not start: {''.join(said) or type(cause).__name__}")


EVERY_SECONDS = 1.0


def end_worker() -> None:
    """In the handler of the error that tells of the loss. A new process brings new ranks."""
    end_process("a rank of the model is gone")


class RankWatch:
    """A thread that asks each of Ray's actors, now and then, for a sign of life.

    A rank that is busy answers after its call, so one question at a time is under way to each, and none is in a hurry.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        on_lost: Callable[[], None] = end_worker,
        *,
        every_seconds: float = EVERY_SECONDS,
    ) -> None:
        """`on_lost` is called once, from the thread, while the error is handled."""
        self._actors = actors
        self._on_lost = on_lost
        self._every_seconds = every_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Before the ranks are ended on purpose. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        questions = [_ask(actor) for actor in self._actors]
        while not self._closed.wait(self._every_seconds):
            try:
                questions = [_renewed(actor, asked) for actor, asked in zip(self._actors, questions, strict=True)]
            except RayError:
                self._on_lost()
                return


def _renewed(actor: Any, asked: Any) -> Any:
    """The next question where this one was answered. Raises RayError where it never will be."""
    answered, _ = ray.wait([asked], timeout=0)
    if not answered:
        return asked
    ray.get(asked)
    return _ask(actor)


def _ask(actor: Any) -> Any:
    """Every actor of Ray has this method."""
    return actor.__ray_ready__.remote()
