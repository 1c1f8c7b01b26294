"""Earlier revisions of operator, API server and chart, as they were installed before an upgrade."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from testcluster.project_images import build_images
from testcluster.tar_files import extract_files

ARCHIVES = Path(__file__).parents[2] / "fixtures" / "revisions"


@dataclass(frozen=True)
class Revision:
    """Its sources, unpacked, and the tag that its images have."""

    number: int
    sources: Path

    @property
    def tag(self) -> str:
        return f"revision-{self.number}"

    @property
    def chart(self) -> Path:
        return self.sources / "charts" / "tinsmith"

    def build_images(self) -> dict[str, Path]:
        """The archives of its API server and its operator. Raises ImagesNotBuilt."""
        return build_images("api-server", "operator", checkout=self.sources, tag=self.tag)


def unpack(number: int, directory: Path) -> Revision:
    with tarfile.open(ARCHIVES / f"{number}.tar.xz") as archive:
        extract_files(archive, directory)
    return Revision(number, directory)
