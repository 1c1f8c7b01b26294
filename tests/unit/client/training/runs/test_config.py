"""Settings of a run: flags override the file, and every mistake has a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tinsmith.training.errors import BadConfig
from tinsmith.training.runs.config import DpoConfig, SftConfig, load_config, require_same, to_yaml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("model: demo/tiny\ndata: a.jsonl\nlearning_rate: 1e-3\n")
    return file


def test_flags_stand_above_the_file_and_the_rest_has_defaults(file: Path) -> None:
    config = load_config(SftConfig, file, {"learning_rate": "2e-4", "logs": "console, tensorboard", "max_steps": "7"})
    assert (config.learning_rate, config.model, config.max_steps) == (2e-4, "demo/tiny", 7)
    assert config.logs == ("console", "tensorboard")
    assert config.batch_size == 8


def test_all_settings_are_written_down_and_read_back(file: Path, tmp_path: Path) -> None:
    config = load_config(DpoConfig, file, {"beta": "0.3"})
    (tmp_path / "whole.yaml").write_text(to_yaml(config))
    assert load_config(DpoConfig, tmp_path / "whole.yaml", {}) == config
    assert yaml.safe_load(to_yaml(config)).keys() == DpoConfig.model_fields.keys()


def test_each_mistake_is_a_line_that_names_its_setting(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lerning_rate: 1\nbatch_size: 0\nschedule: square\ndata: a.jsonl\nlogs: [nowhere]\n")
    with pytest.raises(BadConfig) as raised:
        load_config(SftConfig, file, {})
    lines = str(raised.value).splitlines()
    assert "lerning_rate is not a setting of sft; did you mean learning_rate?" in lines
    assert any(line.startswith("model is required: Base model") and line.endswith("or use --model") for line in lines)
    assert any(line.startswith("batch_size is 0: input should be greater than or equal to 1") for line in lines)
    assert any(line.startswith("schedule is 'square': input should be 'constant', 'linear'") for line in lines)
    assert any(line.startswith("logs.0 is 'nowhere': ") for line in lines)
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [("- a\n- b\n", "has no settings"), ("a: [\n", "is not valid YAML"), (None, "cannot be read: No such file")],
)
def test_a_file_without_settings_is_reported(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadConfig, match=f"run.yaml {message}"):
        load_config(SftConfig, file, {})


def test_a_resumed_run_requires_its_first_settings(file: Path) -> None:
    began = load_config(SftConfig, file, {})
    require_same(load_config(SftConfig, file, {"eval_every": "5", "logs": "tensorboard"}), to_yaml(began), file)
    with pytest.raises(BadConfig, match=r"rank was 32 and is 8: use the same value, or choose another out"):
        require_same(load_config(SftConfig, file, {"rank": "8"}), to_yaml(began), file)


def test_the_folder_of_another_kind_of_run_is_refused(file: Path) -> None:
    dpo = to_yaml(load_config(DpoConfig, file, {}))
    with pytest.raises(BadConfig, match="is from another kind of run than sft: choose another out"):
        require_same(load_config(SftConfig, file, {}), dpo, file)
