"""What ran on one image is replayed on the same one: another may compute other bits.

Only operations whose results were given out bind a journal to an image. What was accepted and never
ran may run anywhere, and after a clean stop a snapshot holds the effect of all that ran.
"""

from __future__ import annotations

import structlog

from tinsmith_trainer import operations as rows
from tinsmith_trainer.errors import ImageChanged
from tinsmith_trainer.journal import Journal
from tinsmith_trainer.volume import Volume

log = structlog.get_logger(__name__)

META_KEY = "image"


def pin_image(volume: Volume, image: str) -> None:
    """Remembers the image under which operations run from now on. Raises ImageChanged, and remembers nothing."""
    journal = Journal(volume.journal_path)
    try:
        before, to_replay = journal.read(lambda db: (rows.get_meta(db, META_KEY), rows.count_to_replay(db))).result()
        if before == image:
            return
        if before is not None and to_replay:
            raise ImageChanged(_refusal(volume, before, image, to_replay), before)
        journal.write(lambda db: rows.set_meta(db, META_KEY, image)).result()
    finally:
        journal.close()
    log.info("image remembered", image=image, before=before)


def _refusal(volume: Volume, before: str, image: str, to_replay: int) -> str:
    return (
        f"{to_replay} operation(s) in the journal in {volume.directory} ran on the image {before} and are in no "
        f"snapshot; {image} may compute other bits than those that clients have. Start {before} once more, let it "
        "stop cleanly, and change the image then."
    )
