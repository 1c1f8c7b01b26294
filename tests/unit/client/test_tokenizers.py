"""`tinsmith doctor` looks for a tokenizer where the SDK does."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers.models.auto.tokenization_auto
from tinker.lib.public_interfaces import sampling_client
from tinsmith.base_models import find_tokenizer, tokenizer_id

pytestmark = pytest.mark.pytorch

NAMES = [
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B:variant",
    "Qwen/Qwen3-8B/variant",
    "meta-llama/Llama-3.1-8B-Instruct",
    "demo/tiny",
    "tiny",
    "/models/tiny",
    "/srv/models/of/tiny",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_becomes_the_form_of_the_sdk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Recorder:
        @staticmethod
        def from_pretrained(identifier: str, **_options: object) -> str:
            asked.append(identifier)
            return "a tokenizer"

    monkeypatch.setattr(transformers.models.auto.tokenization_auto, "AutoTokenizer", Recorder)
    sampling_client._load_tokenizer_from_model_info.__wrapped__(name)
    assert asked == [tokenizer_id(name)]


def test_a_directory_of_that_name_holds_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo" / "tiny").mkdir(parents=True)
    (tmp_path / "demo" / "tiny" / "tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)
    assert find_tokenizer("demo/tiny") == Path("demo/tiny")


@pytest.mark.parametrize("identifier", ["not-cached/repository", "not a repository id", "/no/such/path"])
def test_a_tokenizer_without_a_source_is_not_found(identifier: str) -> None:
    assert find_tokenizer(identifier) is None


def test_the_hubs_cache_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").touch()
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_tokenizer("org/model") == snapshot
