"""The program of docs/how-to/training.md: killed at random moments, it gives the bits of an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tinker
from support.client.page_programs import PageProgram, page_program
from support.client.sdk import adam, next_token_datum
from support.server.serve_process import API_KEY, ServedInstallation
from tinsmith.cli import main
from tinsmith.training import CheckpointManager, Retention

MODEL = "tiny/other-name"
STEPS = 12
KILLS = 3


def test_a_run_that_is_killed_at_random_moments_comes_to_the_bits_of_an_undisturbed_one(
    server: ServedInstallation, tmp_path: Path
) -> None:
    source = page_program("manager.maybe_save(")
    undisturbed, disturbed = (
        PageProgram(server, tmp_path / name, source, MODEL) for name in ("undisturbed", "disturbed")
    )
    expected = undisturbed.run().values
    assert sorted(expected) == list(range(1, STEPS + 1))
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    lives = [disturbed.run((moments.randint(2, 4), moments.uniform(0, 0.5))) for _ in range(KILLS)]
    lives.append(disturbed.run())
    assert lives[0].killed
    for life in lives:
        assert life.values.items() <= expected.items(), f"seed {seed}"
    assert disturbed.adapter(STEPS) == undisturbed.adapter(STEPS), f"seed {seed}"
    for program in (undisturbed, disturbed):
        assert program.store.steps()[-1] == STEPS
        assert 6 in program.store.steps(), "keep_every"
        assert program.store.leftovers() == []
        assert all(program.store.verify(step) for step in program.store.steps())
        names = {"adapter.safetensors", "config.yaml", "tokenizer.json", "trainer_state.pt"}
        assert program.store.metadata(STEPS).files.keys() == names


def manager_of(client: tinker.ServiceClient, root: Path, **options: object) -> CheckpointManager:
    return CheckpointManager(root, client, config={}, tokenizer=False, **options)  # type: ignore[arg-type]


def train(model: tinker.TrainingClient) -> None:
    model.forward_backward([next_token_datum([5, 9, 2, 14, 7])], "cross_entropy")
    model.optim_step(adam())


def states_of(server: ServedInstallation, model: tinker.TrainingClient) -> list[str]:
    rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
    return [each.tinker_path for each in rest.list_checkpoints(model.model_id).result().checkpoints]


def test_a_checkpoint_that_is_removed_takes_its_state_with_it_and_exports_stay_nowhere(
    server: ServedInstallation, client: tinker.ServiceClient, tmp_path: Path
) -> None:
    model = client.create_lora_training_client(MODEL, rank=4).result()
    with manager_of(client, tmp_path, retention=Retention(keep_last=2)) as manager:
        for step in (1, 2, 3):
            train(model)
            manager.save(model, step, loop_state={})
        manager.wait()
        assert manager.store.steps() == [2, 3]
        kept = [manager.store.metadata(step).state_path for step in (2, 3)]
    assert sorted(states_of(server, model)) == sorted(kept)


def test_the_command_asks_the_server_and_removes_states_there(
    server: ServedInstallation, client: tinker.ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    model = client.create_lora_training_client(MODEL, rank=4).result()
    with manager_of(client, tmp_path, adapter=False) as manager:
        for step in (1, 2):
            manager.save(model, step, loop_state={"batch": step})
    assert run("resume", tmp_path, "--base-url", server.url) == 0
    assert run("prune", tmp_path, "--keep-last", 1, "--delete-states", "--base-url", server.url) == 0
    assert states_of(server, model) == [manager.store.metadata(2).state_path]
    tinker.RestClient(base_url=server.url, api_key=API_KEY).delete_checkpoint(
        model.model_id, manager.store.metadata(2).state_path.split("/", 3)[3]
    ).result()
    assert run("resume", tmp_path, "--base-url", server.url) == 1


def run(command: str, *words: object) -> int:
    """Return the exit status of `tinsmith checkpoints`."""
    with pytest.raises(SystemExit) as end:
        main(["checkpoints", command, *map(str, words)])
    return int(end.value.code or 0)
