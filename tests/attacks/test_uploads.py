"""Adapters that would take a worker's memory or its time before anybody looks at them: refused by their sizes alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from support.server.serve_process import (
    API_KEY,
    HTTP_OPTIONS,
    REFERENCE_ENGINE,
    REFERENCE_MODEL,
    ServedInstallation,
    highest_bytes,
)

MIB = 2**20
MOST_MORE_BYTES = 64 * MIB
CONFIG = json.dumps({"r": 4, "lora_alpha": 8}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    model = tmp_path_factory.mktemp("reference")
    (model / "config.json").write_text("{}")
    data = tmp_path_factory.mktemp("uploads")
    server = ServedInstallation(data, {REFERENCE_MODEL: model}, {"engine": REFERENCE_ENGINE}).start()
    assert "not a complete safetensors file" in refusal(server, CONFIG, b"none")  # loads what reads adapters
    yield server
    server.stop()


def refusal(server: ServedInstallation, config: bytes, weights: bytes) -> str:
    started = server.post(
        "/api/v1/external_weights_upload_start", {"base_model": REFERENCE_MODEL, "lora_config": {"rank": 4}}
    ).json()
    files = {"adapter_config.json": config, "adapter_model.safetensors": weights}
    for name, url in started["urls"].items():
        httpx.put(url, content=files[name], headers={"X-API-Key": API_KEY}, **HTTP_OPTIONS).raise_for_status()
    finished = server.post("/api/v1/external_weights_upload_finish", {"upload_id": started["upload_id"]})
    assert finished.status_code == 422, finished.text
    return finished.text


def of_entries(mebibytes: int) -> bytes:
    """Return a header of tensors without numbers, as small as JSON lets them be, and nothing behind it."""
    header = b"{" + b",".join(b'"%d":{"shape":[0]}' % number for number in range(mebibytes * MIB // 24)) + b"}"
    return len(header).to_bytes(8, "little") + header


def of_nesting(mebibytes: int) -> bytes:
    header = b'{"__metadata__":[' + b"[]," * (mebibytes * MIB // 3) + b"[]]}"
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    "weights", [pytest.param(of_entries(20), id="header"), pytest.param(of_nesting(20), id="metadata")]
)
def test_an_upload_beyond_the_limit_is_refused_before_it_is_read(server: ServedInstallation, weights: bytes) -> None:
    [pid] = server.worker_pids()
    before = highest_bytes(pid)
    refused = refusal(server, CONFIG, weights)
    assert "adapter_model.safetensors has" in refused
    assert "the limit" in refused
    assert server.worker_pids() == [pid]
    assert highest_bytes(pid) - before < MOST_MORE_BYTES
