"""A token server that is stopped: its sampler gives the reason, and asks for a new process when it stays stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.sampler.jobs import ask, job, prompt_of, submit
from support.token_server.look_alikes import StandInHand, environment_with_look_alikes, settings_for, variables
from support.token_server.shared import START_SECONDS
from support.waiting import until
from tinsmith_trainer.errors import SamplerClosed, ServerError
from tinsmith_trainer.sampling.token_server import http, progress, server_process
from tinsmith_trainer.sampling.token_server.base import ServerSettings
from tinsmith_trainer.sampling.token_server.sampler import TokenServerSampler
from tinsmith_trainer.sampling.token_server.served_model import read_model
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.worker.token_server_factory import VLLM, start_token_server


@pytest.fixture
def losses() -> list[ServerError]:
    """Return the reasons for which the sampler asks for a new process. A replica ends with the first one."""
    return []


@pytest.fixture
def settings(model: TorchModel, monkeypatch: pytest.MonkeyPatch) -> ServerSettings:
    """Return settings of a server whose health is checked often, and which may be unhealthy for long."""
    monkeypatch.setattr(http, "HEALTH_SECONDS", 0.5)
    monkeypatch.setattr(server_process, "PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(server_process, "ILL_SECONDS", 300.0)
    return settings_for(Path(str(model.directory)), model.info.max_sequence_length)


@pytest.fixture
def sampler(tmp_path: Path, settings: ServerSettings, losses: list[ServerError]) -> Iterator[TokenServerSampler]:
    served = read_model(str(settings.model))
    with variables({**environment_with_look_alikes(tmp_path), "TINSMITH_SUPERVISOR_STOP_SECONDS": "0.1"}):
        sampler = start_token_server(VLLM, settings, served, tmp_path / "scratch", START_SECONDS, losses.append)
        yield sampler
        sampler.close()


def process_of(settings: ServerSettings) -> psutil.Process:
    """Return the server's process, which has a parent with the same arguments."""
    processes = psutil.Process().children(recursive=True)
    return next(one for one in reversed(processes) if str(settings.socket) in one.cmdline() and not one.children())


def test_a_server_with_an_engine_that_makes_no_step_gets_no_samples_although_its_health_check_succeeds(
    sampler: TokenServerSampler, settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "STALL_SECONDS", 0.5)
    with StandInHand(settings.socket_address).held():
        assert sampler.unready_reason is None
        running = submit(sampler, job(prompt_of(20)))
        until(lambda: sampler.unready_reason is not None)
    assert running.get().error is None
    until(lambda: sampler.unready_reason is None)


def test_a_stopped_server_gets_no_samples_with_the_reason_and_is_replaced_if_it_stays_stopped(
    sampler: TokenServerSampler,
    settings: ServerSettings,
    losses: list[ServerError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = process_of(settings)
    server.suspend()
    running = submit(sampler, job(prompt_of(20)))
    until(lambda: sampler.unready_reason is not None)
    assert "vLLM has not been healthy for" in str(sampler.unready_reason)
    server.resume()
    assert running.get().error is None
    until(lambda: sampler.unready_reason is None)
    ask(sampler, job(prompt_of(20)))

    monkeypatch.setattr(server_process, "ILL_SECONDS", 1.0)
    server.suspend()
    until(lambda: bool(losses))
    assert "The server has not been healthy for" in str(losses[0])
    lost = submit(sampler, job(prompt_of(20)))
    sampler.close()
    assert isinstance(lost.get().error, SamplerClosed)
    assert not server.is_running()
