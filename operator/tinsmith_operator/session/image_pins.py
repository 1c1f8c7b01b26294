"""Which images a volume knows: annotations of its claim, beside the journal that depends on them."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    IMAGE_ANNOTATION,
    IMAGE_CHOICE_ANNOTATION,
    IMAGE_DIGEST_ANNOTATION,
    IMAGE_REFUSALS_ANNOTATION,
    IMAGE_REFUSED_ANNOTATION,
    PREVIOUS_IMAGE_ANNOTATION,
    PREVIOUS_IMAGE_DIGEST_ANNOTATION,
)
from tinsmith_operator.build.worker import PinnedImage

CHOSEN_BY_SESSION = "session"


@dataclass(frozen=True)
class Pins:
    """The annotations of the claim. by_session: the spec named the image; else it was the installation's default."""

    image: PinnedImage
    by_session: bool = False
    previous: PinnedImage | None = None
    refused: str | None = None
    refusals: int = 0

    def annotations(self) -> dict[str, str]:
        said = {
            IMAGE_ANNOTATION: self.image.reference,
            IMAGE_DIGEST_ANNOTATION: self.image.digest,
            IMAGE_CHOICE_ANNOTATION: CHOSEN_BY_SESSION if self.by_session else None,
            PREVIOUS_IMAGE_ANNOTATION: self.previous and self.previous.reference,
            PREVIOUS_IMAGE_DIGEST_ANNOTATION: self.previous and self.previous.digest,
            IMAGE_REFUSED_ANNOTATION: self.refused,
            IMAGE_REFUSALS_ANNOTATION: str(self.refusals) if self.refusals else None,
        }
        return {name: value for name, value in said.items() if value}


PIN_ANNOTATIONS = frozenset(
    {
        IMAGE_ANNOTATION,
        IMAGE_DIGEST_ANNOTATION,
        IMAGE_CHOICE_ANNOTATION,
        PREVIOUS_IMAGE_ANNOTATION,
        PREVIOUS_IMAGE_DIGEST_ANNOTATION,
        IMAGE_REFUSED_ANNOTATION,
        IMAGE_REFUSALS_ANNOTATION,
    }
)


def read_pins(claim: Manifest | None) -> Pins | None:
    """None when nothing has run on this volume yet."""
    said = (claim["metadata"].get("annotations") or {}) if claim is not None else {}
    if IMAGE_ANNOTATION not in said:
        return None
    previous = said.get(PREVIOUS_IMAGE_ANNOTATION)
    return Pins(
        image=PinnedImage(said[IMAGE_ANNOTATION], said.get(IMAGE_DIGEST_ANNOTATION)),
        by_session=said.get(IMAGE_CHOICE_ANNOTATION) == CHOSEN_BY_SESSION,
        previous=PinnedImage(previous, said.get(PREVIOUS_IMAGE_DIGEST_ANNOTATION)) if previous else None,
        refused=said.get(IMAGE_REFUSED_ANNOTATION),
        refusals=_count(said.get(IMAGE_REFUSALS_ANNOTATION)),
    )


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
