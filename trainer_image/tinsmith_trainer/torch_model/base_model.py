"""A base model as all know it, without a framework: its facts, its images, and the directory of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinsmith_trainer.errors import ModelNotFound

Quantization = Literal["8bit", "4bit"]


@dataclass(frozen=True, slots=True)
class Image:
    """An image as its sender encoded it, `format` being "png" or "jpeg" in what can be read.

    It stands before text token number `before_token` of its datum or prompt. `expected_tokens`: as many as its sender
    takes it for, if that was said.
    """

    before_token: int
    content: bytes
    format: str
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """The base weights an engine has loaded. `revision` is a digest over the files that decide them.

    `quantization`: `8bit` or `4bit` where they are kept so; empty: as wide as they are computed with. `stored_as`: the
    quantized format of the files, such as `mxfp4`, which are made dense as they are read; empty: they are dense.
    `directory`: of the files; empty: `path` itself, which may also be the name of a hub's repository.
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
"""Other frameworks' copies of the weights, which can double a download."""

TOKEN_CURE = "Give the token of an account that may read it (HF_TOKEN; in a TrainingSession, hub.tokenSecretRef)"


def model_directory(source: str, revision: str | None = None) -> Path:
    """A directory that exists, or the hub's snapshot of a repository, downloaded where it is not cached.

    Raises ModelNotFound, which says whether the name, the revision, the token or the network is to blame.
    """
    path = Path(source)
    if path.is_dir():
        if revision is not None:
            raise ModelNotFound(
                f"{source} is a directory, and only hub repositories have revisions: leave out the revision {revision}."
            )
        return path
    if path.is_absolute() or source.startswith("."):
        raise ModelNotFound(f"The model directory {source} does not exist. Put the model's files there.")
    return _snapshot(source, revision)


def _snapshot(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, ignore_patterns=UNUSED_FILES))
    except Exception as error:  # the hub's client raises its own errors, its HTTP library's, OSError, ValueError
        raise ModelNotFound(_blame(repository, revision, error)) from error


def _blame(repository: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    match error:
        case errors.HfHubHTTPError():
            return _blame_answer(repository, revision, error)
        case errors.HFValidationError():
            return (
                f"{repository!r} is neither a directory nor a name of a model repository. "
                "Give a local directory of the model, or OWNER/NAME."
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"{repository!r} is not a directory here, and the hub cannot be reached to download it. "
                "Give a local directory of the model, or open the way to the hub."
            )
    return _blame_anything(repository, error)


def _blame_answer(repository: str, revision: str | None, error: Exception) -> str:
    """The hub was there, and said no."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return f"The model repository {repository} is gated. Accept its terms on the hub. {TOKEN_CURE}."
        case errors.RepositoryNotFoundError():
            return (
                f"The hub shows no model repository {repository}: its name is wrong, or it is private. {TOKEN_CURE}, "
                "or the directory of a model that is on this machine."
            )
        case errors.RevisionNotFoundError():
            return f"The model repository {repository} has no revision {revision}. Name a branch, a tag or a commit."
    if _status(error) in (401, 403):
        return f"The hub refused the token for {repository}: {_first_line(error)}. {TOKEN_CURE}."
    return _blame_anything(repository, error)


def _blame_anything(repository: str, error: Exception) -> str:
    return (
        f"The model repository {repository} could not be downloaded ({type(error).__name__}: {_first_line(error)}). "
        "Mend that, or give a local directory of the model."
    )


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
