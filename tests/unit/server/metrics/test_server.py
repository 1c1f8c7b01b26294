"""The metrics of the workers."""

from __future__ import annotations

from tinsmith_rpc import worker_pb2
from tinsmith_server.metrics.server import Metrics
from tinsmith_server.metrics.workers import DescribedWorker, SamplingFigures


def described() -> worker_pb2.DescribeReply:
    reply = worker_pb2.DescribeReply(volume_free_bytes=4096, volume_full=True)
    reply.models.add(model_id="sess-1:train:0", queued=2, oldest_queued_seconds=3.5, snapshot_age_seconds=10)
    reply.models.add(model_id="sess-1:train:1", queued=1, oldest_queued_seconds=1.5, corrupted="broken")
    reply.models.add(model_id="sess-1:train:2", quarantined="it ends the process", parked=True)
    reply.model_places = 64
    reply.metrics.trained_tokens = 7
    reply.metrics.operations_done = 5
    reply.metrics.operations_given_up = 2
    reply.metrics.adapters_evicted, reply.metrics.eviction_seconds = 6, 1.5
    reply.metrics.adapters_restored, reply.metrics.restore_seconds = 4, 2.5
    reply.metrics.adapters_taken["stream"], reply.metrics.streams_failed["slow"] = 8, 9
    reply.metrics.logprob_gap = float("nan")
    reply.metrics.journal_syncs = 3
    reply.metrics.journal_sync_seconds = 0.5
    reply.metrics.journal_sync_histogram.add(upper_bound_seconds=0.1, count=2)
    return reply


def rendered() -> str:
    metrics = Metrics()
    workers = [DescribedWorker("org/tiny", name, described()) for name in ("w1", "w2")]
    metrics.watch(lambda: workers, lambda: {"models.bound": 2}, polls_held=lambda: 4)
    accepting = {("org/tiny", "pool"): 0, ("org/tiny", "colocated"): 1}
    metrics.watch_sampling(lambda: SamplingFigures({("org/tiny", "pool"): 3}, {"org/tiny": 2}, accepting))
    metrics.note_request("/api/v1/optim_step", 200, 0.01)
    metrics.note_request("/api/v1/retrieve_future", 408, 25.0)
    return metrics.render().decode()


def test_queues_and_ages_are_shown_by_base_model_and_worker() -> None:
    text = rendered()
    for line in (
        'tinsmith_queue_depth{base_model="org/tiny",worker="w2"} 3.0',
        'tinsmith_queue_depth{base_model="org/tiny",worker="w1"} 3.0',
        'tinsmith_queue_age_seconds{base_model="org/tiny",worker="w1"} 3.5',
        'tinsmith_snapshot_age_seconds{base_model="org/tiny",worker="w1"} 10.0',
        'tinsmith_models_corrupted{base_model="org/tiny",worker="w1"} 1.0',
        'tinsmith_models_quarantined{base_model="org/tiny",worker="w1"} 1.0',
        'tinsmith_volume_free_bytes{base_model="org/tiny",worker="w1"} 4096.0',
        'tinsmith_volume_full{base_model="org/tiny",worker="w1"} 1.0',
        'tinsmith_model_places{base_model="org/tiny",worker="w1"} 64.0',
        'tinsmith_adapters_parked{base_model="org/tiny",worker="w1"} 1.0',
        'tinsmith_adapters_evicted_total{base_model="org/tiny",worker="w1"} 6.0',
        'tinsmith_adapters_restored_total{base_model="org/tiny",worker="w1"} 4.0',
        'tinsmith_eviction_seconds_total{base_model="org/tiny",worker="w1"} 1.5',
        'tinsmith_restore_seconds_total{base_model="org/tiny",worker="w1"} 2.5',
        'tinsmith_adapters_taken_total{base_model="org/tiny",way="stream",worker="w1"} 8.0',
        'tinsmith_save_streams_failed_total{base_model="org/tiny",reason="slow",worker="w1"} 9.0',
        'tinsmith_operations_given_up_total{base_model="org/tiny",worker="w1"} 2.0',
        'tinsmith_trained_tokens_total{base_model="org/tiny",worker="w1"} 7.0',
        'tinsmith_logprob_gap{base_model="org/tiny",worker="w1"} NaN',
        'tinsmith_futures{base_model="org/tiny",state="done",worker="w1"} 5.0',
        'tinsmith_journal_sync_seconds_bucket{base_model="org/tiny",le="+Inf",worker="w1"} 3.0',
        'tinsmith_objects{kind="models",state="bound"} 2.0',
        "tinsmith_polls_held 4.0",
        'tinsmith_http_requests_total{route="/api/v1/retrieve_future",status="408"} 1.0',
    ):
        assert line in text.splitlines()


def test_a_worker_without_a_volume_has_no_volume_metrics() -> None:
    """A sampler has none."""
    metrics = Metrics()
    metrics.watch(lambda: [DescribedWorker("org/tiny", "pool-1", worker_pb2.DescribeReply())], dict, lambda: 0)
    lines = metrics.render().decode().splitlines()
    assert not [line for line in lines if line.startswith("tinsmith_volume")]


def test_it_shows_where_samples_went_and_which_kind_of_sampler_is_full() -> None:
    lines = rendered().splitlines()
    for line in (
        'tinsmith_samples_given_total{base_model="org/tiny",kind="pool"} 3.0',
        'tinsmith_samples_passed_on_total{base_model="org/tiny"} 2.0',
        'tinsmith_samplers_accepting{base_model="org/tiny",kind="pool"} 0.0',
        'tinsmith_samplers_accepting{base_model="org/tiny",kind="colocated"} 1.0',
    ):
        assert line in lines


def test_held_polls_do_not_count_as_slow_requests() -> None:
    text = rendered()
    assert 'tinsmith_http_request_seconds_count{route="/api/v1/optim_step"} 1.0' in text
    assert 'tinsmith_http_request_seconds_count{route="/api/v1/retrieve_future"}' not in text


def test_two_applications_in_one_process_do_not_add_up() -> None:
    first, second = Metrics(), Metrics()
    first.note_request("/x", 200, 0.1)
    assert b"/x" not in second.render()


def test_no_series_tells_when_another_one_began() -> None:
    assert "_created" not in rendered()
