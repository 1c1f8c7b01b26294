"""List the images that a cluster without internet access must have, and the base images of their builds.

Image_list.py [--registry REGISTRY] The names come from the chart's values and from the Dockerfiles.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from images.sources import GPU_IMAGES, IMAGES, LOCAL_REGISTRY

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tinsmith"
PARTS = {"operator": "operator", "apiServer": "API server", "worker": "workers, samplers, helm test"}
"""The values with an image, and what runs this image."""
FROM = re.compile(r"^FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*$", re.IGNORECASE | re.MULTILINE)
ARGUMENT = re.compile(r"^ARG\s+(\w+)=(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Needed:
    """An image. `purpose` says what runs it, or what is built on it."""

    name: str
    purpose: str


def chart_images(registry: str) -> Iterator[Needed]:
    """Yield the images of a release with the default tag."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for part, purpose in PARTS.items():
        image = values[part]["image"]
        yield Needed(f"{registry}/{image['repository']}:{values['image']['tag'] or version}", purpose)


def base_images() -> Iterator[Needed]:
    """Yield each base image once, with the images of this project that are built on it."""
    purposes: dict[str, list[str]] = {}
    for name, image in (IMAGES | GPU_IMAGES).items():
        for base in bases_of(image.dockerfile):
            purposes.setdefault(base, []).append(name)
    for base, names in purposes.items():
        yield Needed(base, f"build of {', '.join(names)}")


def bases_of(dockerfile: Path) -> list[str]:
    """Return the images outside the Dockerfile that its stages begin with, with the default arguments."""
    text = dockerfile.read_text()
    arguments = dict(ARGUMENT.findall(text))
    stages, bases = set(), []
    for base, stage in FROM.findall(text):
        name = re.sub(
            r"\$\{?(\w+)\}?", lambda found: arguments.get(found[1], f"your image, by --build-arg {found[1]}"), base
        )
        if name not in stages and name not in bases:
            bases.append(name)
        stages.add(stage)
    return bases


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--registry", default=LOCAL_REGISTRY, help="registry of your images")
    options = parser.parse_args(arguments)
    rows = [*chart_images(options.registry), *base_images()]
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:{width}}  {row.purpose}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
