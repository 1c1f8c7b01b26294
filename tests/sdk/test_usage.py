"""What a program used, and when, read back by the unmodified SDK and by its command line."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import Result
from support.client.command_line import run_tinker
from support.client.sdk import adam, next_token_datum
from support.server.serve_process import API_KEY, ServedInstallation
from support.waiting import until
from tinker import types

from .conftest import MODEL

TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
DATA = [next_token_datum(TOKENS)] * 2
INPUTS = 2 * (len(TOKENS) - 1)
PROMPT = types.ModelInput.from_ints([5, 9, 2])
SAMPLES, DRAWN = 2, 4


@pytest.fixture(scope="module")
def session_id(server: ServedInstallation) -> str:
    """Of a program that trains, saves and samples, and has ended."""
    client = tinker.ServiceClient(base_url=server.url, api_key=API_KEY, user_metadata={"program": "usage"})
    model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    trained = model.forward_backward(DATA, "cross_entropy")
    model.optim_step(adam()).result()
    trained.result()
    model.forward(DATA, "cross_entropy").result()
    model.save_state("used").result()
    sampler = client.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=DRAWN, seed=1, stop=[])
    sampler.sample(PROMPT, SAMPLES, params).result()
    used = model.get_info().model_id.split(":")[0]
    client.close("success").result()
    return used


@pytest.fixture(scope="module")
def admin(server: ServedInstallation) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=server.url, api_key=API_KEY)


def window() -> tuple[str, str]:
    """All hours of today's tests, as the command line takes them."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return tuple(f"{time:%Y-%m-%dT%H:%M:%SZ}" for time in (hour - timedelta(hours=5), hour + timedelta(hours=1)))  # type: ignore[return-value]


def tokens(events: list[Mapping[str, Any]], session_id: str) -> dict[tuple[str, bool], int]:
    """By kind, and whether it was cached."""
    counted: dict[tuple[str, bool], int] = {}
    for event in events:
        if event["session_id"] == session_id:
            info = event["event_info"]
            key = info["type"], info.get("cached", False)
            counted[key] = counted.get(key, 0) + info.get("token_count", info.get("count", 0))
    return counted


def command(server: ServedInstallation, *words: str) -> Result:
    result = run_tinker(*words, url=server.url, key=API_KEY)
    assert result.exit_code == 0, result.exception or result.output
    return result


def test_a_known_number_of_tokens_is_what_the_sdk_and_its_command_line_report(
    server: ServedInstallation, admin: tinker.AdminClient, session_id: str
) -> None:
    def used() -> dict[tuple[str, bool], int]:
        report = admin.get_billing_usage(*window()).result()
        return tokens([event.model_dump() for event in report.data], session_id)

    until(lambda: ("sampling_sample", False) in used() and ("training", False) in used())
    counted = used()
    prompt = counted.pop(("sampling_prefill", False), 0) + counted.pop(("sampling_prefill", True), 0)
    assert prompt == PROMPT.length
    assert counted == {
        ("training", False): 2 * INPUTS,
        ("sampling_sample", False): SAMPLES * DRAWN,
        ("checkpoint", False): 1,
    }
    printed = json.loads(command(server, "--format", "json", "billing", "usage", *window()).stdout)
    assert tokens(printed["data"], session_id) == used()
    assert printed["sessions"][session_id] == {"user_metadata": {"program": "usage"}}
    assert "training" in command(server, "billing", "usage", *window(), "--csv", "-").stdout


def test_stored_checkpoints_and_what_was_done_to_them_are_reported(
    server: ServedInstallation, admin: tinker.AdminClient, session_id: str
) -> None:
    [stored] = [one for one in admin.get_current_checkpoint_storage_usage().result().data if one.project_id is None]
    assert stored.checkpoint_count >= 1
    assert stored.size_bytes > 0
    printed = json.loads(command(server, "--format", "json", "billing", "checkpoint-storage").stdout)
    counted = [one["checkpoint_count"] for one in printed["data"] if one.get("project_id") is None]
    assert counted == [stored.checkpoint_count]
    path = f"tinker://{session_id}:train:0/weights/used"
    entries = admin.get_audit_log(day=datetime.now(UTC).date()).result().entries
    assert [one.event for one in entries if one.event_details["tinker_path"] == path] == ["checkpoint_saved"]


def test_a_trace_has_the_operations_and_samples_of_its_session_and_parts_lie_in_their_whole(
    server: ServedInstallation, session_id: str, tmp_path: Path
) -> None:
    file = tmp_path / "session.pftrace"
    command(server, "session", "export-trace", session_id, "--output", str(file))
    events = [event for event in json.loads(file.read_bytes())["traceEvents"] if event["ph"] == "X"]
    assert all(event["args"]["request_id"].startswith(f"{session_id}:") for event in events)
    # Its release may be there already, under way, or yet to come.
    wholes = [event for event in events if event["name"] not in ("waiting", "computing", "release_model")]
    assert sorted(event["name"] for event in wholes) == sorted(
        ["create_model", "forward_backward", "optim_step", "forward", "save_weights", "sample"]
    )
    for whole in wholes:
        parts = [event for event in events if event["args"] == whole["args"] and event is not whole]
        assert [part["name"] for part in parts] == ["waiting", "computing"]
        assert whole["ts"] == parts[0]["ts"]
        assert sum(part["dur"] for part in parts) == whole["dur"]
        assert {part["tid"] for part in parts} == {whole["tid"]}
    url = command(server, "session", "export-trace", session_id, "--url-only").stdout.strip().splitlines()[-1]
    with urllib.request.urlopen(url) as answer:
        assert json.loads(answer.read())["otherData"] == {"session_id": session_id}
