"""The rows of the table of faults: what a client sees, after which time, and the test of each row.

The times come from the limits in the code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinsmith_server.fleet import client
from tinsmith_server.fleet.channels import NETWORK_OPTIONS
from tinsmith_server.fleet.local import process
from tinsmith_server.settings import Settings
from tinsmith_server.store import database
from tinsmith_trainer.engines.megatron.parallelism import RANK_WAIT_SECONDS
from tinsmith_trainer.sampling.token_server import http, progress, readiness, server_process
from tinsmith_trainer.training import retries

ROOT = Path(__file__).parents[2]
HEADER = ("Fault, with its test", "What a client sees", "After", "What to do")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a part that runs and does not answer. `test` is `file::function`. An empty `cure` is nothing to do."""

    what: str
    seen: str
    after: str
    cure: str
    test: str
    second_test: str = ""


_KEEPALIVE = dict(NETWORK_OPTIONS)
_PING_SECONDS = (int(_KEEPALIVE["grpc.keepalive_time_ms"]) + int(_KEEPALIVE["grpc.keepalive_timeout_ms"])) / 1000
_NOTICED_SECONDS = process.CHECK_EACH_SECONDS + process.CHECK_SECONDS
_ENDED_SECONDS = process.CHECK_EACH_SECONDS + process.MOST_MISSED_CHECKS * process.CHECK_SECONDS
_HEALTH_SECONDS = server_process.PERIOD_SECONDS + http.HEALTH_SECONDS
_HANG_SECONDS = Settings.model_fields["hang_timeout_seconds"].default

FAULTS = (
    Fault(
        "a worker on the server's machine is stopped",
        "operations are accepted, polls answer 408 with the reason; a new process continues",
        f"{_NOTICED_SECONDS:g} s; {_ENDED_SECONDS:g} s",
        "",
        "tests/contract/fleet/test_silent_workers.py::"
        "test_an_operation_for_a_stopped_worker_is_accepted_and_its_poll_says_why_it_waits",
        "tests/contract/fleet/test_silent_workers.py::test_a_worker_that_stays_stopped_is_replaced_by_a_new_process",
    ),
    Fault(
        "a worker or replica in a cluster falls silent",
        "the same; the kubelet restarts it",
        f"{_PING_SECONDS:g} s; 70 s",
        "",
        "tests/contract/fleet/test_network_client.py::test_a_connection_that_falls_silent_is_noticed_by_pings",
    ),
    Fault(
        "an operation does not end, or a rank hangs",
        "polls name the duration; a new process repeats it",
        f"{_HANG_SECONDS:g} s",
        "raise `hang_timeout_seconds` if needed",
        "tests/contract/fleet/test_silent_workers.py::"
        "test_a_worker_with_an_operation_that_takes_too_long_is_replaced_and_the_reason_names_the_setting",
    ),
    Fault(
        "a rank on a CPU is stopped",
        "a new process repeats the operation",
        f"{RANK_WAIT_SECONDS:g} s",
        "",
        "tests/contract/megatron/test_stopped_ranks.py::test_a_stopped_rank_ends_the_wait_of_the_others_as_a_loss",
        "tests/unit/trainer/engines/megatron/test_ray_answers.py::"
        "test_a_rank_that_stays_silent_after_the_answers_of_the_others_is_lost_at_the_limit",
    ),
    Fault(
        "a worker acknowledges no operation",
        "the operation is accepted, with a notice",
        f"{client.SUBMIT_TIMEOUT_SECONDS:g} s",
        "",
        "tests/contract/http/test_deferred_operations.py::"
        "test_a_call_that_its_worker_does_not_acknowledge_in_time_is_accepted_and_runs_once",
    ),
    Fault(
        "PostgreSQL is stopped",
        "503, of polls 408: “The store at … has not answered”",
        f"{database.ANSWER_SECONDS:g} s",
        "repeat; a write may have happened",
        "tests/contract/store/test_postgresql.py::"
        "test_a_stopped_server_is_one_clear_error_within_the_limit_and_serves_again_when_it_continues",
        "tests/contract/http/test_traps.py::test_trap_01_an_unavailable_store_is_a_408_with_the_reason",
    ),
    Fault(
        "a replica never answers",
        "other replicas take the samples, otherwise 429 with the reason",
        f"{client.QUICK_TIMEOUT_SECONDS:g} s",
        "see its log",
        "tests/contract/fleet/test_silent_workers.py::"
        "test_a_replica_that_accepts_connections_and_never_answers_is_left_out_with_the_reason",
        "tests/contract/http/test_sampler_pools.py::"
        "test_replicas_that_do_not_answer_hold_a_sample_for_a_while_and_not_one_after_the_other",
    ),
    Fault(
        "vLLM or SGLang is stopped",
        "other replicas take new samples; polls name the reason; after its restart 410, and the SDK retries",
        f"{_HEALTH_SECONDS:g} s; {2 * _HEALTH_SECONDS:g} s",
        "",
        "tests/contract/sampler/test_stopped_token_server.py::"
        "test_a_stopped_server_gets_no_samples_with_the_reason_and_is_replaced_if_it_stays_stopped",
    ),
    Fault(
        "vLLM's engine makes no step, though healthy",
        "the same",
        f"{progress.STALL_SECONDS:g} s; {progress.STALL_SECONDS + server_process.ILL_SECONDS:g} s",
        "",
        "tests/contract/sampler/test_stopped_token_server.py::"
        "test_a_server_with_an_engine_that_makes_no_step_gets_no_samples_although_its_health_check_succeeds",
    ),
    Fault(
        "the built-in sampler of a pool hangs",
        "410, and the SDK retries",
        "600 s",
        "",
        "tests/unit/trainer/worker/test_running_sampler.py::"
        "test_a_sampler_with_a_step_that_does_not_end_ends_its_process",
    ),
    Fault(
        "a server loads no adapters",
        "the same as for a silent replica",
        f"at once, or {http.LOAD_SECONDS:g} s; probed every {readiness.PROBE_SECONDS:g} s",
        "see the reason",
        "tests/unit/trainer/sampling/token_server/test_sampler.py::"
        "test_a_server_that_loads_no_adapter_gets_no_samples_until_a_probe_succeeds",
    ),
    Fault(
        "a server loads all adapters but one",
        "its samples fail: “Adapter … was not loaded”; others continue",
        "at once",
        "save again",
        "tests/unit/trainer/sampling/token_server/test_sampler.py::"
        "test_an_adapter_that_the_server_does_not_load_fails_alone_with_one_error",
    ),
    Fault(
        "the checkpoint root is away",
        "saves and loads wait with the reason, then fail with it",
        f"{retries.STORAGE_WAIT_SECONDS:g} s",
        "repeat the save",
        "tests/contract/worker/test_storage_outages.py::"
        "test_a_save_that_waited_too_long_fails_with_a_message_and_the_model_continues",
    ),
)


def rows() -> Iterator[tuple[str, ...]]:
    for fault in FAULTS:
        file, _, _ = fault.test.partition("::")
        yield f"[{fault.what}](../../{file})", fault.seen, fault.after, fault.cure


def missing_tests() -> list[str]:
    """Return the tests of the table that do not exist."""
    tests = [test for fault in FAULTS for test in (fault.test, fault.second_test) if test]
    return [test for test in tests if not _exists(*test.partition("::")[::2])]


def _exists(file: str, function: str) -> bool:
    path = ROOT / file
    if not path.is_file():
        return False
    parts = ast.parse(path.read_text()).body
    names = {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    return not function or function in names
