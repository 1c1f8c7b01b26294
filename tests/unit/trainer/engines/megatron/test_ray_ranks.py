"""Places for ranks that Ray does not give: told in a sentence."""

from __future__ import annotations

import pytest
from ray.exceptions import GetTimeoutError, RayError, RaySystemError
from tinsmith_trainer.engines.megatron import ray_ranks
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.ray_ranks import ON_CPUS, ON_GPUS, RankPlacement, Resources, start_ranks_on
from tinsmith_trainer.errors import ServerError


class Places:
    def ready(self) -> None: ...


class FullRay:
    """A cluster of one CPU that answers every wait with an error."""

    def __init__(self, error: RayError) -> None:
        self.error = error

    def placement_group(self, bundles: list[dict[str, int]], strategy: str) -> Places:
        return Places()

    def remove_placement_group(self, places: Places) -> None:
        """Do nothing: the cluster forgets them with its driver in any case."""

    def get(self, what: object, timeout: float) -> None:
        raise self.error

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0, "GPU": 0.0}

    def nodes(self) -> list[str]:
        return ["one"]


def never(_places: RankPlacement) -> None:
    raise AssertionError("there is no room")


@pytest.mark.parametrize(
    ("each", "error", "sentence"),
    [
        (
            ON_CPUS,
            GetTimeoutError("no"),
            "Ray has no room for --ranks 2 on --nodes 1 .* Each needs a CPU; Ray's nodes: 1, CPUs: 1",
        ),
        (ON_GPUS, GetTimeoutError("no"), ".* Each needs a CPU and a GPU; Ray's nodes: 1, CPUs: 1, GPUs: 0"),
        (ON_CPUS, RaySystemError("the head is gone"), "The ranks did not start: .*the head is gone"),
    ],
)
def test_resources_that_ray_lacks_are_reported_in_one_sentence(
    each: Resources, error: RayError, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    full = FullRay(error)
    monkeypatch.setattr(ray_ranks, "ray", full)
    monkeypatch.setattr(ray_ranks, "placement_group", full.placement_group)
    monkeypatch.setattr(ray_ranks, "remove_placement_group", full.remove_placement_group)
    with pytest.raises(ServerError, match=f"^{sentence}"):
        start_ranks_on(Parallelism(2), 1, each, never, at_close=lambda: closed.append(True))
    assert closed == [True]


class Killing:
    """A cluster that lost its head: nothing can be ended in it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def kill(self, actor: str) -> None:
        self.calls.append(actor)
        raise RaySystemError("the head is gone")

    def remove_placement_group(self, group: str) -> None:
        self.calls.append(group)
        raise RaySystemError("the head is gone")


def places_in(lost: Killing, monkeypatch: pytest.MonkeyPatch) -> RankPlacement:
    monkeypatch.setattr(ray_ranks, "ray", lost)
    monkeypatch.setattr(ray_ranks, "remove_placement_group", lost.remove_placement_group)
    monkeypatch.setattr(ray_ranks, "_reserve", lambda *_: "places")
    places = RankPlacement(2, 1)
    places.actors = ["rank 0", "rank 1"]
    return places


def test_a_rank_that_cannot_be_ended_keeps_no_other_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Killing()
    with pytest.raises(RaySystemError):
        places_in(lost, monkeypatch).close()
    assert sorted(lost.calls) == ["places", "rank 0", "rank 1"]


def test_a_failed_start_leaves_ray_and_raises_its_error_even_if_ranks_cannot_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[bool] = []
    lost = Killing()
    places_in(lost, monkeypatch)

    def start(places: RankPlacement) -> None:
        places.actors = ["rank 0"]
        raise ServerError("Miles refuses its arguments")

    with pytest.raises(ServerError, match="Miles refuses its arguments"):
        start_ranks_on(Parallelism(2), 1, ON_GPUS, start, at_close=lambda: closed.append(True))
    assert (closed, lost.calls) == ([True], ["rank 0", "places"])
