from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_trainer.engines.nemo_rl.group import (
    STOCK_WORKER,
    WORKER,
    RankPythonMissing,
    rank_python,
    register,
)


def test_ranks_run_the_python_that_the_image_prepared_for_megatron_workers(tmp_path: Path) -> None:
    python = tmp_path / STOCK_WORKER / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    registry: dict[str, str] = {}
    register(registry, rank_python({"NEMO_RL_VENV_DIR": str(tmp_path)}))
    assert registry == {WORKER: str(python)}
    assert not registry[WORKER].startswith("uv"), "NeMo RL would build an environment from the network"


def test_an_image_without_that_python_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RankPythonMissing, match="does not exist"):
        rank_python({"NEMO_RL_VENV_DIR": str(tmp_path)})


def test_the_workers_dotted_name_is_a_class_in_a_file_of_the_package() -> None:
    """Ray imports it on the ranks; here NeMo RL is missing, so that it can only be read."""
    module, _, name = WORKER.rpartition(".")
    package = Path(__file__).parents[5] / "trainer_image"
    assert f"class {name}(" in package.joinpath(*module.split(".")).with_suffix(".py").read_text()
