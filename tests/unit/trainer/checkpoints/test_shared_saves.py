"""A worker's newest saves in shared memory: the root's own bits, bounded, gone with who held them, and never needed."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from support.engine.reference import ReferenceEngine
from tinsmith_trainer.checkpoints import shared_saves
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.shared_saves import SaveSocket, SealedWeights, SharedSaves, fetch_save
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.tensor_files import TENSOR_ALIGNMENT_BYTES
from tinsmith_trainer.errors import ServerError

BASE = ReferenceEngine().base_model()
WIDTH = 1024
STATE_BYTES = 2 * WIDTH * 4


def state(seed: int = 0) -> AdapterState:
    drawn = np.random.default_rng(seed).standard_normal((2, WIDTH)).astype(np.float32)
    tensors = {"weights/a.lora_A": drawn[:1], "weights/a.lora_B": drawn[1:], "adam/a.lora_A": drawn[:1]}
    return AdapterState(LoraSpec(rank=1, alpha=16.0, seed=seed), 3, tensors)


def keep(saves: SharedSaves, digest: str, saved: AdapterState) -> None:
    with saves.copying(saved, BASE.revision) as written:
        written(digest)


def sealed_files() -> int:
    """Return the number of sealed files that this process has open or mapped."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            names.append(os.readlink(descriptor))
    return sum("memfd:tinsmith-weights" in name for name in names)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[SaveSocket]:
    door = SaveSocket(tmp_path / "saves", SharedSaves(most=2, size_bytes=3 * STATE_BYTES))
    yield door
    door.close()


@contextmanager
def server(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[Path]:
    """Run a worker that answers one request in this way, and ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(100)
                answer(client)

        serving = threading.Thread(target=serve)
        serving.start()
        yield path
        serving.join()


def test_weights_are_bit_for_bit_those_that_the_root_has(door: SaveSocket, tmp_path: Path) -> None:
    root = CheckpointRoot(f"file://{tmp_path / 'root'}")
    saved = state()
    with door.saves.copying(saved, BASE.revision) as tell:
        written = root.write("m", 1, 1, "sampler", saved, BASE, "ephemeral")
        tell(written.manifest_digest)
    read = root.read(written.directory, written.manifest_digest, BASE).state
    taken = fetch_save(tmp_path / "saves", written.manifest_digest, BASE.revision)
    assert taken is not None
    assert (taken.lora, taken.optimizer_step) == (read.lora, read.optimizer_step)
    assert list(taken.tensors) == list(read.tensors)
    for name, tensor in read.tensors.items():
        assert taken.tensors[name].tobytes() == tensor.tobytes()
        assert taken.tensors[name].flags.writeable
        assert taken.tensors[name].ctypes.data % TENSOR_ALIGNMENT_BYTES == 0


def test_a_change_of_shared_weights_is_invisible_to_other_takers(door: SaveSocket, tmp_path: Path) -> None:
    keep(door.saves, "a", state())
    first, second = (fetch_save(tmp_path / "saves", "a", BASE.revision) for _ in range(2))
    assert first is not None
    assert second is not None
    first.tensors["weights/a.lora_A"][:] = 0
    assert second.tensors["weights/a.lora_A"].tobytes() == state().tensors["weights/a.lora_A"].tobytes()


def test_the_newest_are_kept_as_many_as_were_allowed(door: SaveSocket, tmp_path: Path) -> None:
    for digest in ("a", "b", "c"):
        keep(door.saves, digest, state())
    found = [fetch_save(tmp_path / "saves", digest, BASE.revision) is not None for digest in ("a", "b", "c")]
    assert found == [False, True, True]


def test_a_save_that_could_not_be_written_is_not_kept() -> None:
    saves = SharedSaves()
    with pytest.raises(OSError, match="full"), saves.copying(state(), BASE.revision):
        raise OSError("full")
    assert sealed_files() == 0


def test_memory_is_gone_when_neither_the_worker_nor_a_sampler_has_it(tmp_path: Path) -> None:
    door = SaveSocket(tmp_path / "saves")
    keep(door.saves, "a", state())
    taken = fetch_save(tmp_path / "saves", "a", BASE.revision)
    door.close()
    assert sealed_files() == 1
    assert taken is not None
    assert taken.tensors["weights/a.lora_A"].tobytes() == state().tensors["weights/a.lora_A"].tobytes()
    del taken
    assert sealed_files() == 0


def test_a_machine_without_such_memory_shares_nothing_and_fails_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    keep(SharedSaves(), "a", state())


def test_the_socket_is_its_users_alone_and_takes_the_place_of_an_ended_workers(tmp_path: Path) -> None:
    path = tmp_path / "saves"
    path.touch()
    door = SaveSocket(path)
    assert path.stat().st_mode & 0o777 == 0o600
    door.close()
    assert not path.exists()
    with pytest.raises(ServerError, match="cannot be shared at"):
        SaveSocket(tmp_path / "nowhere" / "saves")


def test_a_worker_that_ends_before_it_answers_gives_nothing(tmp_path: Path) -> None:
    with server(tmp_path / "saves", lambda client: None) as path:
        assert fetch_save(path, "a", BASE.revision) is None


def unsealed(size_bytes: int) -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, size_bytes)
    return descriptor


def test_memory_that_another_process_could_shorten_is_not_mapped(tmp_path: Path) -> None:
    sealed = SealedWeights(state(), BASE.revision)
    other = unsealed(sealed.size_bytes)
    with server(tmp_path / "saves", lambda client: send(client, sealed.description, other)) as path:
        assert fetch_save(path, "a", BASE.revision) is None
    os.close(other)
    sealed.close()


@pytest.mark.parametrize(
    "altered", [{"size_bytes": 10**6}, {"begins_at": 1}, {"lora": {}}, {"base_model_revision": "other"}]
)
def test_shared_memory_that_differs_from_its_description_is_not_used(
    tmp_path: Path, altered: dict[str, object]
) -> None:
    sealed = SealedWeights(state(), BASE.revision)
    description = json.dumps({**json.loads(sealed.description), **altered}).encode()
    with server(tmp_path / "saves", lambda client: send(client, description, sealed.fileno())) as path:
        assert fetch_save(path, "a", BASE.revision) is None
    sealed.close()


def test_an_invalid_description_is_not_used(tmp_path: Path) -> None:
    sealed = SealedWeights(state(), BASE.revision)
    with server(tmp_path / "saves", lambda client: send(client, b"{", sealed.fileno())) as path:
        assert fetch_save(path, "a", BASE.revision) is None
    sealed.close()


def send(client: socket.socket, description: bytes, descriptor: int) -> None:
    socket.send_fds(client, [description], [descriptor])


@pytest.mark.parametrize("error", [MemoryError("no memory left"), RuntimeError("can't start new thread")], ids=repr)
def test_the_save_survives_any_failure_of_the_copy(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    saves = SharedSaves(most=2, size_bytes=3 * STATE_BYTES)
    if isinstance(error, MemoryError):
        monkeypatch.setattr(shared_saves, "SealedWeights", fail)
    else:
        monkeypatch.setattr(threading.Thread, "start", fail)
    keep(saves, "d", state())
    saves.close()
