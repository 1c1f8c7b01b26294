"""A folder belongs to one run from its first checkpoint on."""

from __future__ import annotations

import re
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.client.checkpoints.fake_server import FakeModel, FakeServer, FakeTokenizer
from tinsmith.api import ApiError
from tinsmith.base_models import TokenizerError
from tinsmith.training.checkpoints import manager as manager_module
from tinsmith.training.errors import BadConfig, BadData, ServerNotReady
from tinsmith.training.runs import opening
from tinsmith.training.runs.config import SftConfig
from tinsmith.training.runs.loop import FIRST_SIGNAL, SECOND_SIGNAL, StopRequest
from tinsmith.training.runs.opening import claim_folder, opened

pytestmark = pytest.mark.pytorch


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def config(out: Path, **given: Any) -> SftConfig:
    return SftConfig(model="demo/tiny", data=Path("a.jsonl"), out=out, **given)


def with_checkpoint(out: Path) -> None:
    folder = out / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "metadata.json").touch()


def test_a_run_without_a_checkpoint_may_begin_again_with_other_settings_and_data(out: Path) -> None:
    claim_folder(config(out), "one")
    claim_folder(config(out, rank=4), "another")
    assert yaml.safe_load((out / "config.yaml").read_text())["rank"] == 4


@pytest.mark.parametrize("place", ["{tmp}/file", "{tmp}/file/run", "/proc/none", "/sys/kernel"])
def test_a_folder_that_cannot_be_written_is_a_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = Path(place.format(tmp=tmp_path))
    with pytest.raises(BadConfig, match=f"out is {re.escape(str(folder))}, which cannot be written: "):
        claim_folder(config(folder), "one")


def test_a_run_with_a_checkpoint_requires_its_settings_and_data(out: Path) -> None:
    claim_folder(config(out), "one")
    with_checkpoint(out)
    claim_folder(config(out, keep_last=5), "one")
    assert yaml.safe_load((out / "config.yaml").read_text())["keep_last"] == 5
    with pytest.raises(BadConfig, match="rank was 32 and is 4"):
        claim_folder(config(out, rank=4), "one")
    with pytest.raises(BadData, match=r"the data differs from the data of the run in .*: choose another out"):
        claim_folder(config(out), "another")


def test_a_run_resumes_after_its_folder_and_its_data_were_moved(out: Path, tmp_path: Path) -> None:
    """A file may be named differently; only its content counts."""
    claim_folder(config(out), "one")
    with_checkpoint(out)
    moved = out.rename(tmp_path / "moved")
    elsewhere = SftConfig(model="demo/tiny", data=tmp_path / "a.jsonl", eval_data=tmp_path / "b.jsonl", out=moved)
    claim_folder(elsewhere, "one")
    assert yaml.safe_load((moved / "config.yaml").read_text())["data"] == str(tmp_path / "a.jsonl")
    with pytest.raises(BadData, match="the data differs from"):
        claim_folder(elsewhere, "another")


class Opened(Exception):
    """An error that is raised when a session is opened."""


@pytest.mark.parametrize("url", [None, "http://10.0.0.7:8000"])
def test_training_uses_the_server_that_described_the_model(
    out: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    """The SDK would send the data to the vendor's server if it got no URL."""
    asked: list[tuple[str, str | None]] = []

    def session(*, base_url: str, api_key: str | None, display_name: str) -> None:
        assert display_name == str(out)
        assert (base_url, api_key) == asked[0]
        raise Opened

    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-this-server")
    monkeypatch.setattr(opening, "require_server", lambda model, *server: asked.append(server))
    monkeypatch.setattr(opening, "load_tokenizer", lambda model, *server: asked.append(server))
    monkeypatch.setattr(opening.tinker, "ServiceClient", session)
    with pytest.raises(Opened), opened(config(out), "one"):
        pass
    assert asked == [(url or "http://127.0.0.1:8000", "tml-of-this-server")] * 2


class Service(FakeServer):
    """A session whose model has this tokenizer."""

    def __init__(self, tokenizer: object) -> None:
        super().__init__()
        self.model = FakeModel(self)
        self.model.tokenizer = tokenizer

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def create_lora_training_client(self, *_: object, **__: object) -> Future[FakeModel]:
        future: Future[FakeModel] = Future()
        future.set_result(self.model)
        return future


@pytest.mark.parametrize(("tokenizer", "is_fast"), [(FakeTokenizer(), True), (object(), False)])
def test_a_tokenizer_without_a_file_is_reported_once_and_the_run_is_saved_without_it(
    out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokenizer: object, is_fast: bool
) -> None:
    service = Service(tokenizer)
    monkeypatch.setattr(manager_module, "ServerStates", service)
    monkeypatch.setattr(opening, "require_server", lambda *_: None)
    monkeypatch.setattr(opening, "load_tokenizer", lambda *_: None)
    monkeypatch.setattr(opening.tinker, "ServiceClient", lambda **_: service)
    with opened(config(out), "one") as run:
        for step in (1, 2):
            run.manager.save(run.client, step, loop_state={})
    told = "object has no tokenizer.json, so the run's checkpoints will have no tokenizer"
    assert caplog.messages == ([] if is_fast else [told])
    for step in (1, 2):
        folder = out / "checkpoints" / f"step-00000{step}"
        assert (folder / "metadata.json").exists()
        assert (folder / "tokenizer.json").exists() is is_fast


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_does_as_ever(number: signal.Signals) -> None:
    def as_ever(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, as_ever)
    try:
        said: list[str] = []
        with StopRequest.listening(said.append) as stop:
            assert not stop.requested
            signal.raise_signal(number)
            assert stop.requested
            assert said == [FIRST_SIGNAL]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            assert said == [FIRST_SIGNAL, SECOND_SIGNAL]
        assert signal.getsignal(number) is as_ever
    finally:
        signal.signal(number, before)


def test_the_tokenizer_of_the_server_is_used_without_a_request_to_the_sdk(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, own = Service(object()), object()
    monkeypatch.setattr(manager_module, "ServerStates", service)
    monkeypatch.setattr(opening, "require_server", lambda *_: None)
    monkeypatch.setattr(opening, "load_tokenizer", lambda *_: own)
    monkeypatch.setattr(opening.tinker, "ServiceClient", lambda **_: service)
    with opened(config(out), "one") as run:
        assert run.tokenizer is own


@pytest.mark.parametrize(
    ("error", "becomes"), [(TokenizerError("it is cut off"), BadConfig), (ApiError("it is cut off"), ServerNotReady)]
)
def test_a_tokenizer_that_cannot_be_had_ends_the_run_before_its_first_step(
    out: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, becomes: type[Exception]
) -> None:
    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(opening, "require_server", lambda *_: None)
    monkeypatch.setattr(opening, "load_tokenizer", fail)
    with pytest.raises(becomes, match="it is cut off"), opened(config(out), "one"):
        pass
