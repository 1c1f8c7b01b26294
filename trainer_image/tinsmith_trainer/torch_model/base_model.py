"""Properties, images and files of a base model, for code that imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinsmith_trainer.errors import ModelNotFound

Quantization = Literal["8bit", "4bit"]


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image of a datum or prompt, before the text token with the index `before_token`.

    `format` is "png" or "jpeg" if the image can be read. `expected_tokens` is the number of tokens that the sender
    expects for the image, or None.
    """

    before_token: int
    content: bytes
    format: str
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """The properties of the base weights that an engine has loaded.

    `revision` is a digest of the files that determine the weights.

    `quantization` is `8bit` or `4bit`; empty means full width. `stored_as` is the quantized format of the files, such
    as `mxfp4`, which is unpacked at the read; empty means dense files. `directory` holds the files. If `directory` is
    empty, `path` is the directory. If `directory` is set, `path` may be the name of a hub repository.
    """

    path: str
    architecture: str
    revision: str
    vocab_size: int
    max_sequence_length: int
    quantization: str = ""
    stored_as: str = ""
    directory: str = ""


UNUSED_FILES = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.pth", "original/*"]
"""Copies of the weights for other frameworks. The copies can double the size of a download."""

TOKEN_CURE = "Set HF_TOKEN (in a TrainingSession: hub.tokenSecretRef) to the token of an account that may read it"


def model_directory(source: str, revision: str | None = None) -> Path:
    """Return an existing directory, or the snapshot of a hub repository, after a download if necessary.

    Raises ModelNotFound, which says whether the name, the revision, the token or the network is the cause.
    """
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise ModelNotFound(
                f"{source} is a directory, and only hub repositories have revisions: omit the revision {revision}."
            )
        return path
    if path.is_absolute() or source.startswith("."):
        raise ModelNotFound(f"The model directory {source} does not exist. Put the model's files there.")
    return _snapshot(source, revision)


def _snapshot(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, ignore_patterns=UNUSED_FILES))
    except Exception as error:  # from the hub's client, its HTTP library, OSError, ValueError
        raise ModelNotFound(_blame(repository, revision, error)) from error


def _blame(repository: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    match error:
        case errors.HfHubHTTPError():
            return _blame_answer(repository, revision, error)
        case errors.HFValidationError():
            return (
                f"{repository!r} is neither a directory nor the name of a model repository. "
                "Use a local directory of the model, or OWNER/NAME."
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"{repository!r} is not a directory here, and the hub cannot be reached to download it. "
                "Use a local directory of the model, or allow access to the hub."
            )
    return _blame_anything(repository, error)


def _blame_answer(repository: str, revision: str | None, error: Exception) -> str:
    """Explain an error that the hub returned."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return f"The model repository {repository} is gated. Accept its terms on the hub. {TOKEN_CURE}."
        case errors.RepositoryNotFoundError():
            return (
                f"The hub has no visible model repository {repository}: the name is wrong, or it is private. "
                f"{TOKEN_CURE}, or use a local directory of the model."
            )
        case errors.RevisionNotFoundError():
            return f"The model repository {repository} has no revision {revision}. Name a branch, a tag or a commit."
    if _status(error) in (401, 403):
        return f"The hub refused the token for {repository}: {_first_line(error)}. {TOKEN_CURE}."
    return _blame_anything(repository, error)


def _blame_anything(repository: str, error: Exception) -> str:
    return (
        f"The model repository {repository} could not be downloaded ({type(error).__name__}: {_first_line(error)}). "
        "Fix the cause, or use a local directory of the model."
    )


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
