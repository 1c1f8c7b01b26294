"""A training loop's view of its checkpoints, with a server in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.client.checkpoints.fake_server import FakeModel, FakeServer
from tinsmith.training import CheckpointManager, Retention
from tinsmith.training.checkpoints import manager as manager_module
from tinsmith.training.checkpoints.store import CheckpointStore
from tinsmith.training.checkpoints.trainer_state import read_trainer_state
from tinsmith.training.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointExists,
    SaveFailed,
    StateGone,
    UnfitLoopState,
)

pytestmark = pytest.mark.pytorch

LIMIT_SECONDS = 20.0
Manage = Callable[..., CheckpointManager]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(manager_module, "ServerStates", server)
    return server


@pytest.fixture
def model(server: FakeServer) -> Any:
    return FakeModel(server)


@pytest.fixture
def manage(server: FakeServer, tmp_path: Path) -> Manage:
    def manage(**options: Any) -> CheckpointManager:
        return CheckpointManager(tmp_path, server, config={"lr": 0.01}, **options)  # type: ignore[arg-type]

    return manage


def train(manager: CheckpointManager, model: Any, steps: range) -> None:
    for step in steps:
        model.train(step)
        manager.save(model, step, loop_state={"batch": step})


def go_on_without_end(manager: CheckpointManager, model: Any) -> None:
    while True:
        manager.maybe_save(model, 3, loop_state={})


def save_and_fail(manager: CheckpointManager, model: Any, error: type[BaseException] = ZeroDivisionError) -> None:
    with manager:
        manager.save(model, 1, loop_state={})
        raise error


def loop_state_of(store: CheckpointStore, step: int) -> Any:
    with store.open(step, "trainer_state.pt") as stream:
        return read_trainer_state(stream.read()).loop_state


def test_a_directory_has_everything_that_a_resume_needs(
    manage: Manage, server: FakeServer, model: Any, tmp_path: Path
) -> None:
    with manage() as manager:
        model.train(7)
        manager.save(model, 1, loop_state={"epoch": 0, "batch": 3}, metrics={"loss": 0.5})
        model.train(8)
    folder = tmp_path / "step-000001"
    assert (folder / "adapter.safetensors").read_bytes() == bytes([7])
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"lr": 0.01}
    assert (folder / "tokenizer.json").read_text() == '{"version": "1.0"}'
    metadata = manager.store.verify(1)
    assert (metadata.base_model, metadata.metrics, metadata.adapter_config) == ("org/tiny", {"loss": 0.5}, {"r": 8})
    assert server.states == {metadata.state_path: bytes([7])}
    resumed = manage().resume()
    assert resumed is not None
    assert (resumed.step, resumed.loop_state, resumed.metrics) == (1, {"epoch": 0, "batch": 3}, {"loss": 0.5})
    assert resumed.training_client.weights == bytes([7])  # type: ignore[attr-defined]


def test_a_checkpoint_may_omit_the_adapter_and_the_tokenizer(manage: Manage, server: FakeServer, model: Any) -> None:
    with manage(adapter=False, tokenizer=False) as manager:
        train(manager, model, range(1, 2))
    assert manager.store.metadata(1).files.keys() == {"config.yaml", "trainer_state.pt"}
    assert server.exports == {}


def test_a_checkpoint_has_the_optimizer_as_a_pytorch_file_on_request(manage: Manage, model: Any) -> None:
    with manage(optimizer=True) as manager:
        train(manager, model, range(1, 3))
    assert manager.store.verify(2).files.keys() >= {"adapter.safetensors", "optimizer.pt"}
    with manager.store.open(2, "optimizer.pt") as stream:
        assert torch.load(stream)["moments"].tolist() == [1, 2]
    assert not manager.store.leftovers()


def test_a_save_does_not_hold_the_loop_up(
    manage: Manage, server: FakeServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    fetch = server.fetch_adapter

    def fetch_later(export_path: str, target: Path) -> dict[str, Any]:
        assert go_on.wait(LIMIT_SECONDS)
        return fetch(export_path, target)

    monkeypatch.setattr(server, "fetch_adapter", fetch_later)
    loop_state = {"batches": [1]}
    with manage() as manager:
        manager.save(model, 1, loop_state=loop_state)
        model.train(2)
        loop_state["batches"].append(2)
        assert manager.store.steps() == []
        go_on.set()
        manager.wait()
        assert manager.store.steps() == [1]
    assert loop_state_of(manager.store, 1) == {"batches": [1]}, "as it was when the save was asked for"


@pytest.mark.parametrize("every", [0, 3])
def test_maybe_save_saves_every_so_many_steps(manage: Manage, model: Any, every: int) -> None:
    with manage(save_every=every) as manager:
        saved = [step for step in range(8) if manager.maybe_save(model, step, loop_state={})]
    assert saved == manager.store.steps() == ([3, 6] if every else [])


def test_the_error_of_a_save_is_raised_at_the_next_step_and_leaves_no_state(
    manage: Manage, server: FakeServer, model: Any
) -> None:
    server.failure = ConnectionError("no route to host")
    with manage(save_every=2) as manager:
        manager.maybe_save(model, 2, loop_state={})
        with pytest.raises(SaveFailed, match="saving step 2: no route to host"):
            go_on_without_end(manager, model)
        assert server.states == {}
        server.failure = None
        manager.maybe_save(model, 4, loop_state={})
    assert manager.store.steps() == [4]


def test_a_failed_last_save_is_raised_at_the_end_of_the_loop(manage: Manage, server: FakeServer, model: Any) -> None:
    server.failure = ConnectionError("no route to host")
    with pytest.raises(SaveFailed, match="saving step 1: no route to host"), manage() as manager:
        manager.save(model, 1, loop_state={})


def test_a_failed_save_does_not_hide_the_error_that_ended_the_loop(
    manage: Manage, server: FakeServer, model: Any
) -> None:
    server.failure = ConnectionError("no route to host")
    with pytest.raises(ZeroDivisionError) as error:
        save_and_fail(manage(), model)
    assert error.value.__notes__ == ["saving step 1: no route to host"]


def test_an_interrupt_waits_for_no_save_and_an_unfinished_save_is_no_checkpoint(
    manage: Manage, server: FakeServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, ended = threading.Event(), threading.Event()
    fetch, delete = server.fetch_adapter, server.delete

    def fetch_later(export_path: str, target: Path) -> dict[str, Any]:
        assert go_on.wait(LIMIT_SECONDS)
        return fetch(export_path, target)

    def delete_and_tell(path: str) -> None:
        delete(path)
        ended.set()

    monkeypatch.setattr(server, "fetch_adapter", fetch_later)
    monkeypatch.setattr(server, "delete", delete_and_tell)
    manager = manage()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        save_and_fail(manager, model, KeyboardInterrupt)
    assert interrupt.value.__notes__ == ["the save of step 1 was not finished and is discarded"]
    with pytest.raises(SaveFailed, match="the program was interrupted"):
        manager.wait()
    with pytest.raises(CheckpointError, match="create another one to resume"):
        manager.save(model, 2, loop_state={})
    go_on.set()
    assert ended.wait(LIMIT_SECONDS)
    assert (manager.store.steps(), server.states) == ([], {})


@pytest.mark.parametrize("delete_states", [True, False])
def test_a_checkpoint_that_no_rule_keeps_goes_and_its_state_if_it_may(
    manage: Manage, server: FakeServer, model: Any, delete_states: bool
) -> None:
    with manage(retention=Retention(keep_last=1, keep_every=2), delete_states=delete_states) as manager:
        train(manager, model, range(1, 6))
    assert manager.store.steps() == [2, 4, 5]
    assert len(server.states) == (3 if delete_states else 5)
    for metadata in manager.store.readable():
        assert server.states[metadata.state_path] == bytes(range(1, metadata.step + 1))


def test_metrics_after_a_save_decide_which_checkpoints_stay(manage: Manage, model: Any) -> None:
    with manage(retention=Retention(keep_last=2, keep_best=1, metric="eval/reward", mode="max")) as manager:
        for step, reward in ((1, 0.2), (2, 0.9), (3, 0.1), (4, 0.5)):
            manager.save(model, step, loop_state={}, metrics={"loss": 1.0})
            manager.add_metrics(step, {"eval/reward": reward})
        train(manager, model, range(5, 6))
    assert manager.store.steps() == [2, 4, 5]
    assert manager.store.verify(2).metrics == {"loss": 1.0, "eval/reward": 0.9}


def test_the_first_save_of_the_next_run_removes_the_remains_of_a_killed_run_and_their_state(
    manage: Manage, server: FakeServer, model: Any, tmp_path: Path
) -> None:
    with manage() as manager:
        train(manager, model, range(1, 3))
    (tmp_path / "step-000002").rename(tmp_path / ".writing-step-000002")
    (tmp_path / ".writing-step-000002" / "metadata.json").unlink()
    resumed = manage().resume()
    assert resumed is not None
    assert resumed.step == 1
    with manage() as manager:
        train(manager, resumed.training_client, range(2, 3))
    assert manager.store.leftovers() == []
    assert server.states.keys() == {metadata.state_path for metadata in manager.store.readable()}


def test_a_run_resumes_from_the_newest_intact_checkpoint_and_names_the_skipped_ones(
    manage: Manage, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert manage().resume() is None
    with manage() as manager:
        train(manager, model, range(1, 4))
    (tmp_path / "step-000003" / "config.yaml").write_text("lr: 0.02\n")
    resumed = manage().resume()
    assert resumed is not None
    assert (resumed.step, [damage.step for damage in resumed.skipped]) == (2, [3])
    assert "step 3 is skipped" in caplog.text
    earlier = manage().resume(1)
    assert earlier is not None
    assert earlier.training_client.weights == bytes([1])  # type: ignore[attr-defined]
    with pytest.raises(CheckpointDamaged):
        manage().resume(3)


@pytest.mark.parametrize("delete_states", [True, False])
def test_a_run_that_goes_back_replaces_the_newer_ones_and_their_states(
    manage: Manage, server: FakeServer, model: Any, tmp_path: Path, delete_states: bool
) -> None:
    with manage() as manager:
        train(manager, model, range(1, 6))
    (tmp_path / "step-000004" / "metadata.json").write_text("{}")
    with manage(retention=Retention(keep_last=2), delete_states=delete_states) as manager:
        resumed = manager.resume(2)
        assert resumed is not None
        assert manager.store.steps() == [1, 2, 3, 4, 5], "until the next save"
        train(manager, resumed.training_client, range(3, 4))
        manager.wait()
        assert manager.store.steps() == [2, 3]
        with pytest.raises(CheckpointExists):
            manager.save(model, 3, loop_state={})
    assert len(server.states) == (2 if delete_states else 6)
    newest = manage().resume()
    assert newest is not None
    assert newest.training_client.weights == bytes([1, 2, 3])  # type: ignore[attr-defined]


def test_a_run_that_goes_back_loses_nothing_to_a_server_that_is_away(
    manage: Manage, server: FakeServer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manage() as manager:
        train(manager, model, range(1, 4))
    manager = manage()
    resumed = manager.resume(1)
    assert resumed is not None
    away: Future[Any] = Future()
    away.set_exception(ConnectionError("no route to host"))
    with monkeypatch.context() as patched:
        patched.setattr(FakeModel, "save_state", lambda *_, **__: away)
        manager.save(resumed.training_client, 2, loop_state={})
        with pytest.raises(SaveFailed, match="saving step 2: no route"):
            manager.wait()
    assert manager.store.steps() == [1, 2, 3]
    manager.save(resumed.training_client, 2, loop_state={})
    manager.close()
    assert manager.store.steps() == [1, 2]


def test_a_damaged_one_is_saved_again_and_its_state_goes(
    manage: Manage, server: FakeServer, model: Any, tmp_path: Path
) -> None:
    with manage() as manager:
        train(manager, model, range(1, 3))
    (tmp_path / "step-000002" / "config.yaml").write_text("lr: 0.02\n")
    with manage() as manager:
        train(manager, model, range(2, 3))
    assert manager.store.verify(2)
    assert server.states.keys() == {metadata.state_path for metadata in manager.store.readable()}


def test_a_state_that_is_gone_is_an_error_and_no_older_one_is_taken(
    manage: Manage, server: FakeServer, model: Any
) -> None:
    with manage() as manager:
        train(manager, model, range(1, 3))
    server.delete(manager.store.metadata(2).state_path)
    with pytest.raises(StateGone):
        manage().resume()


def test_a_loop_state_holds_numbers_strings_and_tensors(manage: Manage, model: Any) -> None:
    import random

    import torch

    state = {"batch": 3, "seen": [1, (2, None)], "python": random.getstate(), "torch": torch.get_rng_state()}
    with manage() as manager:
        manager.save(model, 1, loop_state=state)
    read = loop_state_of(manager.store, 1)
    assert torch.equal(read.pop("torch"), state.pop("torch"))  # type: ignore[arg-type]
    assert read == state


@pytest.mark.parametrize("value", [Path("data"), lambda: 0, threading.Lock()], ids=["object", "function", "lock"])
def test_a_loop_state_that_would_run_code_to_be_read_is_refused_at_once(
    manage: Manage, server: FakeServer, model: Any, value: object
) -> None:
    """The loop state is refused even when PyTorch would read it, since another library has allowed the type."""
    import torch

    found = r"loop_state may contain numbers, strings.*: loop_state\['data'\]\[1\] is of "
    with (
        torch.serialization.safe_globals([type(value)]),
        manage() as manager,
        pytest.raises(UnfitLoopState, match=found),
    ):
        manager.save(model, 1, loop_state={"data": [0, value]})
    assert server.states == {}


def test_a_slow_tokenizer_is_one_sentence(manage: Manage, model: Any) -> None:
    model.tokenizer = object()
    manager = manage()
    manager.save(model, 1, loop_state={})
    with pytest.raises(SaveFailed, match=r"object has no tokenizer\.json: .* or tokenizer=False"):
        manager.close()
