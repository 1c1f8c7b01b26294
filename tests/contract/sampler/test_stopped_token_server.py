"""A token server that is stopped: its sampler gives the reason, and asks for a new process when it stays stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Watched:
    """A sampler with its own server, and the reasons for which it asks for a new process. A replica ends with one."""

    sampler: TokenServerSampler
    settings: ServerSettings
    losses: list[ServerError] = field(default_factory=list)


@pytest.fixture(scope="module")
def watched(model_of: Callable[[str], TorchModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Return a sampler that checks the health of its server often, and lets the server be unhealthy for long.

    The last test of this module stops the server for good.
    """
    folder, losses = tmp_path_factory.mktemp("stopped"), list[ServerError]()
    served = read_model(str(model_of("qwen3").directory))
    settings = settings_for(served.directory, served.info.max_sequence_length)
    programs = {**environment_with_look_alikes(folder), "TINSMITH_SUPERVISOR_STOP_SECONDS": "0.1"}
    with pytest.MonkeyPatch.context() as patches, variables(programs):
        patches.setattr(http, "HEALTH_SECONDS", 0.5)
        patches.setattr(server_process, "PERIOD_SECONDS", 0.1)
        patches.setattr(server_process, "ILL_SECONDS", 300.0)
        sampler = start_token_server(VLLM, settings, served, folder / "scratch", START_SECONDS, losses.append)
        yield Watched(sampler, settings, losses)
        sampler.close()


def process_of(settings: ServerSettings) -> psutil.Process:
    """Return the server's process, which has a parent with the same arguments."""
    processes = psutil.Process().children(recursive=True)
    return next(one for one in reversed(processes) if str(settings.socket) in one.cmdline() and not one.children())


def test_a_server_with_an_engine_that_makes_no_step_gets_no_samples_although_its_health_check_succeeds(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = watched.sampler
    until(lambda: sampler.unready_reason is None)
    monkeypatch.setattr(progress, "STALL_SECONDS", 0.5)
    with StandInHand(watched.settings.socket_address).held():
        running = submit(sampler, job(prompt_of(20)))
        until(lambda: sampler.unready_reason is not None)
    assert running.get().error is None
    until(lambda: sampler.unready_reason is None)


def test_a_stopped_server_gets_no_samples_with_the_reason_and_is_replaced_if_it_stays_stopped(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, losses = watched.sampler, watched.losses
    server = process_of(watched.settings)
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
