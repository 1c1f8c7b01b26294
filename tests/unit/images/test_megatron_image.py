"""Two Dockerfiles make workers on CPUs: one with Megatron and Ray, whose image is larger."""

from __future__ import annotations

import difflib

from images.sources import IMAGES, OPTIONAL_IMAGES, Image

DIFFERENCES = {
    "COPY requirements/trainer-image.txt /opt/tinsmith/requirements.txt": (
        "COPY requirements/trainer-megatron-image.txt /opt/tinsmith/requirements.txt"
    ),
    'LABEL org.opencontainers.image.title="Tinsmith trainer (CPU)" \\': (
        'LABEL org.opencontainers.image.title="Tinsmith trainer (CPU, Megatron over Ray)" \\'
    ),
}


def lines_of(image: Image) -> list[str]:
    return [line for line in image.dockerfile.read_text().splitlines() if not line.startswith("#")]


def test_the_image_with_megatron_differs_from_the_other_by_its_packages_alone() -> None:
    plain, megatron = lines_of(IMAGES["trainer"]), lines_of(OPTIONAL_IMAGES["trainer-megatron"])
    changed = [line for line in difflib.ndiff(plain, megatron) if line.startswith(("- ", "+ "))]
    assert {line[2:] for line in changed if line.startswith("- ")} == set(DIFFERENCES)
    assert {line[2:] for line in changed if line.startswith("+ ")} == set(DIFFERENCES.values())
