from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import errors
from tinsmith_trainer.errors import ModelNotFound
from tinsmith_trainer.torch_model.base_model import UNUSED_FILES, model_directory


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Exception | None], list[dict[str, Any]]]:
    """Set the hub's answer; return the requests it gets."""

    def answer(error: Exception | None = None) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def snapshot_download(repository: str, **options: Any) -> str:
            asked.append({"repository": repository, **options})
            if error is not None:
                raise error
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return asked

    return answer


def refused(kind: type[errors.HfHubHTTPError], status: int, words: str = "no") -> errors.HfHubHTTPError:
    return kind(words, response=httpx.Response(status, request=httpx.Request("GET", "https://hub")))


def test_a_repository_is_downloaded_at_its_revision(
    hub: Callable[[Exception | None], list[dict[str, Any]]], tmp_path: Path
) -> None:
    asked = hub(None)
    assert model_directory("Qwen/Qwen3-8B", "abc123") == tmp_path
    assert asked == [{"repository": "Qwen/Qwen3-8B", "revision": "abc123", "ignore_patterns": UNUSED_FILES}]


@pytest.mark.parametrize("path", ["/models/absent", "./absent"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(
    hub: Callable[[Exception | None], list[dict[str, Any]]], path: str
) -> None:
    asked = hub(None)
    with pytest.raises(ModelNotFound, match=f"The model directory {path} does not exist"):
        model_directory(path)
    assert asked == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refused(errors.RepositoryNotFoundError, 401), r"no visible model repository some/model.*tokenSecretRef"),
        (refused(errors.GatedRepoError, 403), r"is gated\. Accept its terms.*HF_TOKEN"),
        (refused(errors.RevisionNotFoundError, 404), r"has no revision v2\. Name a branch"),
        (refused(errors.HfHubHTTPError, 403, "Forbidden"), r"refused the token for some/model: Forbidden"),
        (refused(errors.HfHubHTTPError, 502, "Bad gateway"), r"could not be downloaded \(HfHubHTTPError: Bad gateway"),
        (errors.LocalEntryNotFoundError("offline"), r"the hub cannot be reached.*allow access"),
        (errors.HFValidationError("bad"), r"neither a directory nor the name of a model repository"),
        (httpx.ReadTimeout("timed out\nlong"), r"could not be downloaded \(ReadTimeout: timed out\)"),
        (OSError(28, "No space left on device"), r"No space left on device"),
    ],
)
def test_each_way_to_fail_has_its_sentence_and_its_cure(
    hub: Callable[[Exception | None], list[dict[str, Any]]], error: Exception, message: str
) -> None:
    hub(error)
    with pytest.raises(ModelNotFound, match=message):
        model_directory("some/model", "v2")


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    assert model_directory(str(tmp_path)) == tmp_path
    with pytest.raises(ModelNotFound, match="only hub repositories have revisions: omit the revision v2"):
        model_directory(str(tmp_path), "v2")
