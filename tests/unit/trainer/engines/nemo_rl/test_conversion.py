"""A model is converted by a process of its own, alone, and counts when it is whole. That process is a stand-in here."""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.nemo_rl.rank_python import SAVE, SAVE_HALF, conversions_begun, write_rank_python
from tinsmith_trainer.engines.nemo_rl.conversion import (
    BRIDGE_COMMIT,
    ROOT_VARIABLE,
    WHOLE,
    conversion_folder,
    converted_model,
)
from tinsmith_trainer.engines.nemo_rl.group import rank_python
from tinsmith_trainer.errors import ServerError

VERSIONS = Path(__file__).parents[5] / "trainer_image" / "versions.toml"
REPORT = """
held = []
for descriptor in os.listdir("/proc/self/fd"):
    try:
        held.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        pass
import json
Path(folder).with_name("report").write_text(json.dumps([dict(os.environ), held]))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {ROOT_VARIABLE: str(tmp_path), **write_rank_python(tmp_path / "venvs")}


def convert(environment: Mapping[str, str], revision: str = "a") -> Path:
    return converted_model(Path("/models/base"), revision, rank_python(environment), environment)


def rank_program(environment: Mapping[str, str], *steps: str) -> None:
    write_rank_python(Path(environment["NEMO_RL_VENV_DIR"]), *steps)


def test_a_model_is_converted_once_and_found_from_then_on(environment: dict[str, str], tmp_path: Path) -> None:
    first = convert(environment)
    assert (first / "run_config.yaml").exists()
    assert first.name == "iter_0000000"
    assert convert(environment) == first
    assert conversions_begun(tmp_path) == [str(first.parent)]


def test_a_conversion_is_named_after_what_made_it_the_commit_that_the_image_has() -> None:
    """Megatron-Bridge does not promise that it reads what another version wrote."""
    assert tomllib.loads(VERSIONS.read_text())["megatron-bridge"]["commit"] == BRIDGE_COMMIT
    assert conversion_folder("a", {"HF_HOME": "/cache"}) == Path(f"/cache/nemo_rl/a-{BRIDGE_COMMIT[:12]}")


@pytest.mark.parametrize("left", [["iter_0000000/run_config.yaml"], [WHOLE], []], ids=["weights", "mark", "nothing"])
def test_the_remains_of_a_dead_process_are_removed(
    left: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """A mark without weights is one of an older layout."""
    folder = conversion_folder("a", environment)
    for name in [*left, "rest"]:
        folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(name).touch()
    convert(environment)
    assert not (folder / "rest").exists()
    assert len(conversions_begun(tmp_path)) == 1


def test_a_waiting_process_finds_the_conversion_of_another(environment: dict[str, str], tmp_path: Path) -> None:
    folder = conversion_folder("a", environment)
    with folder.with_name(f"{folder.name}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def finish_the_other(_seconds: float) -> None:
            (folder / "iter_0000000").mkdir(parents=True)
            (folder / "iter_0000000" / "run_config.yaml").touch()
            (folder / WHOLE).touch()
            fcntl.flock(other, fcntl.LOCK_UN)

        converted_model(Path("/models/base"), "a", rank_python(environment), environment, sleep=finish_the_other)
    assert conversions_begun(tmp_path) == []


def test_a_process_that_waited_for_a_dead_one_converts_the_model_itself(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder = conversion_folder("a", environment)
    with folder.with_name(f"{folder.name}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        converted_model(Path("/models/base"), "a", rank_python(environment), environment, sleep=lambda _: other.close())
    assert len(conversions_begun(tmp_path)) == 1


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("Path(folder, 'failure').write_text('KeyError: no mapping for x'); sys.exit(1)", "KeyError: no mapping for x"),
        ("os.kill(os.getpid(), 9)", "was killed, probably out of memory.*more memory"),
        ("os.kill(os.getpid(), 11)", "ended by SIGSEGV; see its output above"),
        ("sys.exit(3)", "ended with status 3; see its output above"),
    ],
)
def test_a_conversion_that_fails_says_why_and_counts_for_nothing(
    end: str, sentence: str, environment: dict[str, str], tmp_path: Path
) -> None:
    rank_program(environment, SAVE_HALF, end)
    with pytest.raises(ServerError, match=f"/models/base could not be converted.*{sentence}"):
        convert(environment)
    rank_program(environment, SAVE)
    convert(environment)
    assert len(conversions_begun(tmp_path)) == 2


def test_the_process_that_converts_gets_neither_secrets_nor_the_ranks_meeting_place(
    environment: dict[str, str], tmp_path: Path
) -> None:
    rank_program(environment, REPORT, SAVE)
    convert({**environment, "HF_TOKEN": "secret", "MASTER_ADDR": "head", "MASTER_PORT": "1", "OMP_NUM_THREADS": "3"})
    variables, _ = json.loads((tmp_path / "report").read_text())
    assert (variables["OMP_NUM_THREADS"], variables["HF_HUB_OFFLINE"]) == ("3", "1")
    assert not {"HF_TOKEN", "MASTER_ADDR", "MASTER_PORT"} & set(variables)


def test_the_lock_is_held_as_long_as_anything_of_the_conversion_lives(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Were this process killed, its child might write on for a moment."""
    rank_program(environment, REPORT, SAVE)
    folder = convert(environment).parent
    _, held = json.loads((tmp_path / "report").read_text())
    assert str(folder.with_name(f"{folder.name}.lock")) in held


def test_a_conversion_is_marked_after_its_bytes_are_on_the_disk(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    convert(environment)
    mark = synced.index(f".{WHOLE}.tmp")
    assert {"__0_0.distcp", "run_config.yaml", "iter_0000000"} <= set(synced[:mark])
