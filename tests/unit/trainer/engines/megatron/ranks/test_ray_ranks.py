"""Places for ranks that Ray does not give: told in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import GetTimeoutError, RayError, RaySystemError
from tinsmith_trainer.engines.megatron.model.cpu_rank import RankModel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.ranks import ray_ranks
from tinsmith_trainer.engines.megatron.ranks.ray_ranks import RayRanks
from tinsmith_trainer.errors import ServerError

MODEL = RankModel(Path("model"), Parallelism(2), max_rank=8)


class Places:
    def ready(self) -> None: ...


class FullRay:
    """A cluster of one CPU that answers every wait with an error."""

    def __init__(self, error: RayError) -> None:
        self.error = error

    def placement_group(self, bundles: list[dict[str, int]], strategy: str) -> Places:
        return Places()

    def remove_placement_group(self, places: Places) -> None:
        """The cluster would forget them with its driver in any case."""

    def get(self, what: object, timeout: float) -> None:
        raise self.error

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def nodes(self) -> list[str]:
        return ["one"]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            GetTimeoutError("no"),
            "Ray has no room for --ranks 2 on --nodes 1 .* Ray's nodes: 1, their CPUs: 1",
        ),
        (RaySystemError("the head is gone"), "The ranks did not start: .*the head is gone"),
    ],
)
def test_places_that_ray_does_not_give_are_told_in_a_sentence(
    error: RayError, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FullRay(error)
    monkeypatch.setattr(ray_ranks, "ray", full)
    monkeypatch.setattr(ray_ranks, "placement_group", full.placement_group)
    monkeypatch.setattr(ray_ranks, "remove_placement_group", full.remove_placement_group)
    with pytest.raises(ServerError, match=f"^{sentence}"):
        RayRanks(MODEL)
