"""The metadata of a trigger for KEDA, and the decisions from the descriptions of a pool's replicas."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import worker_pb2
from tinsmith_rpc.external_scaler_pb2 import ScaledObjectRef
from tinsmith_server.routes.external_scaler import METRICS, Trigger, TriggerInvalid, parse_trigger
from tinsmith_server.services.pool_demand import IN_USE_SECONDS, is_in_use, is_wanted, load_of

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TARGETS = st.dictionaries(st.sampled_from(list(METRICS)), st.floats(1e-6, 1e12), min_size=1)


def reference(**metadata: str) -> ScaledObjectRef:
    return ScaledObjectRef(name="scaled", namespace="team", scaler_metadata=metadata)


@given(TARGETS)
def test_a_trigger_names_its_pool_and_its_targets_and_may_have_the_metadata_of_keda(targets: dict[str, float]) -> None:
    texts = {name: repr(target) for name, target in targets.items()}
    read = parse_trigger(reference(pool="fast", scalerAddress="server:9092", enableTLS="true", **texts))
    assert read == Trigger("team", "fast", targets)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"unfinishedSamples": "4"}, "'pool' is missing"),
        ({"pool": "", "unfinishedSamples": "4"}, "'pool' is missing"),
        ({"pool": "fast"}, "at least one of the metadata unfinishedSamples, oldestSampleSeconds, tokensPerSecond"),
        ({"pool": "fast", "unfinishedSample": "4"}, "'unfinishedSample' is unknown"),
        ({"pool": "fast", "unfinishedSamples": "four"}, "'unfinishedSamples' is 'four'; set it to a number above 0"),
        ({"pool": "fast", "tokensPerSecond": "0"}, "'tokensPerSecond' is '0'"),
        ({"pool": "fast", "tokensPerSecond": "-3"}, "'tokensPerSecond' is '-3'"),
        ({"pool": "fast", "oldestSampleSeconds": "inf"}, "'oldestSampleSeconds' is 'inf'"),
        ({"pool": "fast", "oldestSampleSeconds": "nan"}, "'oldestSampleSeconds' is 'nan'"),
    ],
)
def test_invalid_metadata_are_refused_by_name(metadata: dict[str, str], named: str) -> None:
    with pytest.raises(TriggerInvalid, match=named):
        parse_trigger(reference(**metadata))


def description(active: int, waiting: int, oldest: float, speed: float, idle: float = 0.0) -> worker_pb2.DescribeReply:
    metrics = worker_pb2.WorkerMetrics(
        samples_active=active,
        samples_waiting=waiting,
        oldest_sample_seconds=oldest,
        sampled_tokens_per_second=speed,
    )
    return worker_pb2.DescribeReply(metrics=metrics, idle_seconds=idle)


COUNTS = st.integers(0, 10**6)
REPLICAS = st.lists(st.tuples(COUNTS, COUNTS, COUNTS, COUNTS), max_size=20)


@given(REPLICAS)
def test_the_load_of_a_pool_is_the_sum_of_its_replicas_and_their_oldest_sample(
    replicas: list[tuple[int, int, int, int]],
) -> None:
    load = load_of([description(*replica) for replica in replicas])
    assert load.unfinished_samples == sum(active + waiting for active, waiting, _, _ in replicas)
    assert load.oldest_sample_seconds == max((oldest for _, _, oldest, _ in replicas), default=0)
    assert load.tokens_per_second == sum(speed for *_, speed in replicas)


@given(st.lists(st.floats(0, 10 * IN_USE_SECONDS), max_size=20))
def test_a_pool_is_in_use_as_long_as_one_of_its_replicas_is(idle: list[float]) -> None:
    in_use = is_in_use([description(0, 0, 0, 0, seconds) for seconds in idle])
    assert in_use == (min(idle, default=IN_USE_SECONDS) < IN_USE_SECONDS)


@given(st.floats(-10, 10 * IN_USE_SECONDS))
def test_a_pool_is_wanted_for_a_minute_after_a_sample_that_found_no_replica(seconds: float) -> None:
    """The clock of the server that wrote the time may be ahead."""
    wanted_at = NOW - timedelta(seconds=seconds)
    assert is_wanted(wanted_at, NOW) == (NOW - wanted_at < timedelta(seconds=IN_USE_SECONDS))
    assert not is_wanted(None, NOW)
