"""The needs of a program: a body of `check_needs`, or the metadata of a model that is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError

from tinsmith_server.wire.json_bodies import sentence
from tinsmith_server.wire.requests import Request, Words
from tinsmith_server.wire.responses import Response

METADATA_KEY = "tinsmith-needs"
"""The key of `user_metadata` whose value has the needs as JSON."""

Module = Literal["attn", "mlp", "unembed"]


class InvalidNeeds(ValueError):
    """The needs cannot be read. The message is for the user."""


class Needs(Request):
    """The needs of a program. A field that is left out is not checked."""

    # A misspelt need would never be checked.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = Field(None, description="The base model, as programs name it.")
    loss: str | Annotated[Words, Field(max_length=16)] | None = Field(
        None, description="A loss, or a list of losses; `custom` for custom ones."
    )
    optimizer: str | None = Field(None, description="The optimizer's type.")
    rank: int | None = Field(None, ge=1, description="The LoRA rank, for training.")
    modules: tuple[Module, ...] = Field((), strict=False, description="The modules that LoRA trains.")
    context: int | None = Field(None, ge=1, description="The longest sequence, in tokens.")
    images: bool = Field(False, description="Images in datums and prompts.")
    audio: bool = Field(False, description="Audio in datums and prompts.")
    sampling: bool = Field(False, description="Samples of the model and of its adapters with this rank.")
    numerics: Literal["exact", "fast"] | None = Field(
        None, description="`exact`: a replay after a crash gives the same bits."
    )
    quantization: str | None = Field(None, description="The format of the base weights; `none` for dense ones.")

    @property
    def losses(self) -> list[str]:
        return [self.loss] if isinstance(self.loss, str) else self.loss or []


class NeedsResponse(Response):
    """The needs that are not met, as sentences. The list is empty if the server meets all needs."""

    unmet: list[str]


def needs_in(metadata: Mapping[str, str] | None) -> Needs | None:
    """Return the needs in the metadata of a model, or None. Raises InvalidNeeds."""
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        return None
    try:
        return Needs.model_validate_json(text)
    except ValidationError as error:
        raise InvalidNeeds(f"user_metadata[{METADATA_KEY!r}] is not valid: {sentence(error)}") from error
