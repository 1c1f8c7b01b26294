"""The order in which a sampler asks its server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.sampler.jobs import ask, job, prompt_of, submit
from support.tiny_models import tiny_directory
from support.waiting import until
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.errors import SamplerClosed, ServerError
from tinsmith_trainer.sampling.base import Sequence
from tinsmith_trainer.sampling.token_server.adapters import AdapterFolders
from tinsmith_trainer.sampling.token_server.base import Generation, GenerationRequest, OnToken, TokenServer
from tinsmith_trainer.sampling.token_server.http import LoopThread
from tinsmith_trainer.sampling.token_server.sampler import TokenServerSampler
from tinsmith_trainer.sampling.token_server.served_model import read_model

MOST_DRAWS = 8
NOTHING = AdapterState(LoraSpec(rank=4, alpha=32.0, seed=0), optimizer_step=0, tensors={})


class Recording(TokenServer):
    """A server that remembers what it is asked, and forgets no adapter before it may."""

    scores_heads = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_unload = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.refused: set[str] = set()
        self.loads_nothing = False

    async def load_adapter(self, name: str, folder: Path) -> None:
        key = name.partition("-")[0]
        self.calls.append(f"load {key}")
        if self.loads_nothing or key in self.refused:
            raise ServerError("it answered with status 500: CUDA error.")

    async def unload_adapter(self, name: str) -> None:
        await asyncio.to_thread(self.may_unload.wait, 60)
        self.calls.append(f"unload {name.partition('-')[0]}")

    async def draw(self, request: GenerationRequest, drawn: OnToken | None = None) -> Generation:
        self.calls.append(f"begin {len(request.prompt)}")
        await asyncio.to_thread(self.answers.wait, 60)
        self.calls.append(f"end {len(request.prompt)}")
        tokens = np.zeros(request.max_tokens, np.int32)
        sequence = Sequence(tokens, np.zeros(request.max_tokens, np.float32), stopped=False)
        return Generation(sequence, None, 0, candidates=np.zeros(len(request.candidates), np.float32))

    async def is_healthy(self) -> bool:
        return True

    async def close(self) -> None:
        self.may_unload.set()


@pytest.fixture
def server() -> Recording:
    return Recording()


@pytest.fixture
def sampler(server: Recording, tmp_path: Path) -> Iterator[TokenServerSampler]:
    async def nothing() -> None:
        pass

    model = read_model(str(tiny_directory()))
    folders, thread = AdapterFolders(tmp_path), LoopThread("recorded")
    sampler = TokenServerSampler(server, model, folders, thread, nothing, most_draws=MOST_DRAWS)
    yield sampler
    sampler.close()


def test_a_dropped_adapter_leaves_the_server_before_the_next_one_comes(
    sampler: TokenServerSampler, server: Recording
) -> None:
    """Otherwise the server has one too many, and evicts one that is in use."""
    sampler.load_adapter("old", NOTHING)
    sampler.drop_adapter("old")
    loading = threading.Thread(target=sampler.load_adapter, args=("new", NOTHING))
    loading.start()
    ask(sampler, job(prompt_of(3), max_tokens=1))
    assert "load new" not in server.calls
    server.may_unload.set()
    loading.join(60)
    assert [call for call in server.calls if "load" in call] == ["load old", "unload old", "load new"]


def test_an_adapter_that_is_in_use_holds_up_no_other(sampler: TokenServerSampler, server: Recording) -> None:
    sampler.load_adapter("old", NOTHING)
    sampler.load_adapter("new", NOTHING)
    assert server.calls == ["load old", "load new"]


def test_an_adapter_that_the_server_does_not_load_fails_alone_with_one_error(
    sampler: TokenServerSampler, server: Recording
) -> None:
    server.refused, _ = {"bad"}, server.may_unload.set()
    sampler.load_adapter("before", NOTHING)
    for _ in range(2):
        with pytest.raises(ServerError, match=r"Adapter bad was not loaded\. .* loads other adapters") as error:
            sampler.load_adapter("bad", NOTHING)
        assert not isinstance(error.value, SamplerClosed)
    sampler.load_adapter("after", NOTHING)
    assert sampler.unready_reason is None
    assert [sampler.has_adapter(key) for key in ("before", "bad", "after")] == [True, False, True]


def test_a_server_that_loads_no_adapter_gets_no_samples_until_a_probe_succeeds(
    sampler: TokenServerSampler, server: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_trainer.sampling.token_server.sampler.PROBE_SECONDS", 0.01)
    server.loads_nothing, _ = True, server.may_unload.set()
    for key in ("one", "two"):
        with pytest.raises(SamplerClosed, match=r"loads no adapters and gets no samples .* CUDA error"):
            sampler.load_adapter(key, NOTHING)
    assert "CUDA error" in str(sampler.unready_reason)
    assert "load two" not in server.calls
    server.loads_nothing = False
    until(lambda: sampler.unready_reason is None)
    sampler.load_adapter("one", NOTHING)
    assert sampler.has_adapter("one")


def test_a_probe_that_the_server_refuses_at_the_start_blames_no_server(
    sampler: TokenServerSampler, server: Recording
) -> None:
    server.refused = {"probe", "bad"}
    sampler.check_probe()
    with pytest.raises(ServerError, match="Adapter bad was not loaded"):
        sampler.load_adapter("bad", NOTHING)
    assert sampler.unready_reason is None


def test_the_whole_of_a_prompt_is_with_the_server_before_its_beginnings_are_asked_about(
    sampler: TokenServerSampler, server: Recording
) -> None:
    ask(sampler, job(prompt_of(5), max_tokens=2, targets=np.ones((4, 1))))
    assert server.calls[:2] == ["begin 4", "end 4"]
    assert sorted(server.calls[2:6]) == ["begin 1", "begin 2", "begin 3", "begin 5"]
    until(lambda: len(server.calls) == 10)


def test_a_flood_leaves_the_server_room_for_another_and_the_next_draws_go_by_turns(
    sampler: TokenServerSampler, server: Recording
) -> None:
    server.answers.clear()
    many = [submit(sampler, replace(job(prompt_of(9), max_tokens=1, num_samples=20), tenant="many")) for _ in range(3)]
    until(lambda: server.calls.count("begin 9") == MOST_DRAWS // 2)
    few = submit(sampler, replace(job(prompt_of(4), max_tokens=1), tenant="few"))
    until(lambda: "begin 4" in server.calls)
    assert server.calls.count("begin 9") == MOST_DRAWS // 2
    server.answers.set()
    assert few.get().error is None
    assert [len(answer.get().sequences) for answer in many] == [20, 20, 20]


def test_a_job_that_was_cancelled_while_it_waited_keeps_no_place(
    sampler: TokenServerSampler, server: Recording
) -> None:
    server.answers.clear()
    waiting = submit(sampler, job(prompt_of(9), max_tokens=1, num_samples=20, request_id="waiting"))
    until(lambda: server.calls.count("begin 9") == MOST_DRAWS // 2)
    sampler.cancel("waiting")
    assert "cancelled" in str(waiting.get().error)
    server.answers.set()
    assert len(ask(sampler, job(prompt_of(4), max_tokens=1, num_samples=20)).sequences) == 20
    assert server.calls.count("begin 9") == MOST_DRAWS // 2
