"""Many samples through the unmodified SDK: one poll for all of them, and clients that are copies of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tinker
from support.client.sdk import service_client
from support.server.serve_process import API_KEY, ServedInstallation
from tinker import types
from tinsmith_rpc import SAMPLES_OF_A_CLIENT

from .conftest import MODEL

PROMPT = types.ModelInput.from_ints([5, 9, 2, 14])
SAMPLES = 40


def params(seed: int) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=8, seed=seed)


def polls(server: ServedInstallation, route: str) -> float:
    """Return the number of polls that this server has answered."""
    lines = server.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("tinsmith_http_requests_total") and f'/{route}"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counted)


def tokens_of(sampler: tinker.SamplingClient) -> list[list[int]]:
    futures = [sampler.sample(PROMPT, 2, params(seed)) for seed in range(SAMPLES)]
    return [list(sequence.tokens) for future in futures for sequence in future.result().sequences]


@pytest.fixture
def polled(server: ServedInstallation, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.SamplingClient]:
    """Return a client that uses the session poller, as the setting would tell it."""
    with service_client(server) as client:
        told = client.holder.get_client_config().model_copy(update={"sample_use_retrieve_futures": True})
        monkeypatch.setattr(client.holder, "_client_config", told)
        yield client.create_sampling_client(base_model=MODEL).result()


def test_one_poll_for_all_brings_the_same_samples_with_fewer_polls(
    server: ServedInstallation, client: tinker.ServiceClient, polled: tinker.SamplingClient
) -> None:
    expected = tokens_of(client.create_sampling_client(base_model=MODEL).result())
    before = polls(server, "retrieve_future"), polls(server, "retrieve_futures")
    assert tokens_of(polled) == expected
    fetched, asked = polls(server, "retrieve_future") - before[0], polls(server, "retrieve_futures") - before[1]
    assert (fetched, 0 < asked <= SAMPLES) == (SAMPLES, True)


def test_copies_of_a_sampling_client_number_their_samples_apart(
    client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    sampler = client.create_sampling_client(base_model=MODEL).result()
    handle = sampler.get_sampler_handle()
    copies = [tinker.SamplingClient.from_sampler_handle(handle) for _ in range(3)]
    sequences = [one.sample(PROMPT, 1, params(3)).result().sequences[0] for one in (sampler, *copies)]
    numbers = [int(str(sequence.sequence_id).rsplit(":", 2)[1]) for sequence in sequences]
    assert numbers == [0, *(copy * SAMPLES_OF_A_CLIENT for copy in (1, 2, 3))]
    assert len({tuple(sequence.tokens) for sequence in sequences}) == 1
