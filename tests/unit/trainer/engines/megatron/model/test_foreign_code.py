from __future__ import annotations

import json
from pathlib import Path

import pytest
from tinsmith_trainer.engines.megatron.model.ranked_model import check_no_code
from tinsmith_trainer.errors import ModelDirectoryInvalid


def test_a_model_with_a_program_in_its_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").touch()
    with pytest.raises(ModelDirectoryInvalid, match=r"modeling_own\.py"):
        check_no_code(tmp_path, "NeMo RL")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_model_that_names_a_program_elsewhere_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(json.dumps({"auto_map": {"AutoConfig": "someone/repository--module.Config"}}))
    with pytest.raises(ModelDirectoryInvalid, match=file):
        check_no_code(tmp_path, "NeMo RL")
