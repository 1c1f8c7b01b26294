"""The usage of a program over time, read by the unmodified SDK and by its command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
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
    """Return the session of a program that trained, saved and sampled, and has ended."""
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
    """Return arguments for all hours of today's tests."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return tuple(f"{time:%Y-%m-%dT%H:%M:%SZ}" for time in (hour - timedelta(hours=5), hour + timedelta(hours=1)))  # type: ignore[return-value]


def tokens(events: list[Mapping[str, Any]], session_id: str) -> dict[tuple[str, bool], int]:
    """Return the tokens by kind, and whether they were cached."""
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


def test_the_sdk_and_its_command_line_report_a_known_number_of_tokens(
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
