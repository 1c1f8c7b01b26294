"""The estimated load of a sampler."""

from __future__ import annotations

import pytest
from support.server.fake_fleet import FakeReplica
from tinsmith_rpc import worker_pb2
from tinsmith_server.services.sampling.routing import SamplerLoads


def describe_reply(active: int, waiting: int) -> worker_pb2.DescribeReply:
    metrics = worker_pb2.WorkerMetrics(samples_active=active, samples_waiting=waiting)
    return worker_pb2.DescribeReply(metrics=metrics)


def unfinished(loads: SamplerLoads) -> dict[str, int]:
    samplers = [FakeReplica(name, "tiny-1") for name in ("a", "b")]
    return {load.sampler_id: load.unfinished for load in loads.of(samplers)}


def test_it_is_what_the_sampler_said_and_what_was_given_to_it_since() -> None:
    loads = SamplerLoads()
    assert unfinished(loads) == {"a": 0, "b": 0}
    loads.refresh({"a": describe_reply(3, 4)})
    loads.note_taken("a", "one")
    loads.note_taken("b", "two")
    assert unfinished(loads) == {"a": 8, "b": 1}


def test_a_refresh_replaces_the_local_counts() -> None:
    loads = SamplerLoads()
    loads.note_taken("a", "one")
    loads.refresh({"a": describe_reply(0, 5)})
    assert unfinished(loads) == {"a": 5, "b": 0}
    loads.refresh({})
    assert unfinished(loads) == {"a": 0, "b": 0}


@pytest.mark.parametrize("reads", [1, 3])
def test_a_sample_that_ended_counts_no_more_however_often_it_is_read(reads: int) -> None:
    loads = SamplerLoads()
    loads.note_taken("a", "one")
    loads.note_taken("a", "two")
    for _ in range(reads):
        loads.record_end("a", "one")
        loads.record_end("b", "never here")
    assert unfinished(loads) == {"a": 1, "b": 0}


def test_a_silent_sampler_is_known_until_it_answers() -> None:
    loads = SamplerLoads()
    assert loads.answers("a")
    loads.note_silent("a")
    assert not loads.answers("a")
    loads.note_taken("a", "one")
    assert loads.answers("a")
    loads.refresh({"a": describe_reply(0, 0)}, silent={"b"})
    assert (loads.answers("a"), loads.answers("b")) == (True, False)
    loads.refresh({"b": describe_reply(0, 0)})
    assert loads.answers("b")
