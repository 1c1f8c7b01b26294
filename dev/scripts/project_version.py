"""The version of the project, and the places that repeat it because their formats cannot read pyproject.toml.

Project_version.py [VERSION] Without an argument, the program prints the version, and fails if a place has another one.
With an argument, it writes the version to pyproject.toml and to every place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = r"\d+\.\d+\.\d+"
"""A version of three numbers, which Python, Helm and image tags write in the same way."""
SOURCE = "pyproject.toml"
# A version stands between the two parts of each pattern. Images of this project have its version as their tag.
OF_AN_IMAGE = rf"((?:tinsmith|tinsmith-\w+)(?:/[\w-]+|-[\w-]+)?:)({VERSION})()"
PLACES: dict[str, tuple[str, ...]] = {
    SOURCE: (rf'(?m)^(version = ")({VERSION})(")$',),
    "charts/tinsmith/Chart.yaml": (rf"(?m)^(version: )({VERSION})()$", rf'(?m)^(appVersion: ")({VERSION})(")$'),
    "api_server/Dockerfile": (rf'(image\.version=")({VERSION})(")',),
    "operator/Dockerfile": (rf'(image\.version=")({VERSION})(")',),
    "trainer_image/Dockerfile*": (rf'(image\.version=")({VERSION})(")',),
    "console/package*.json": (rf'("name": "tinsmith-console",\s+"version": ")({VERSION})(")',),
    "examples/**/*.yaml": (OF_AN_IMAGE,),
    "examples/**/Dockerfile": (OF_AN_IMAGE,),
    "docs/**/*.md": (OF_AN_IMAGE,),
}


def project_version() -> str:
    return next(version for file, version in found() if file == SOURCE)


def found() -> Iterator[tuple[str, str]]:
    """Yield each place, as the file's path, with its version."""
    for file, pattern in _patterns():
        for match in re.finditer(pattern, file.read_text()):
            yield file.relative_to(ROOT).as_posix(), match[2]


def write(version: str) -> None:
    for file, pattern in _patterns():
        text = file.read_text()
        changed = re.sub(pattern, rf"\g<1>{version}\g<3>", text)
        if changed != text:
            file.write_text(changed)


def _patterns() -> Iterator[tuple[Path, str]]:
    for glob, patterns in PLACES.items():
        for file in sorted(ROOT.glob(glob)):
            for pattern in patterns:
                yield file, pattern


def main(arguments: list[str]) -> int:
    if arguments:
        [version] = arguments
        if re.fullmatch(VERSION, version) is None:
            print(f"{version} is not a version: write three numbers, such as 0.2.0", file=sys.stderr)
            return 2
        write(version)
    version = project_version()
    print(version)
    others = [f"{file} has version {other}, and {SOURCE} {version}" for file, other in found() if other != version]
    print(*others, sep="\n", end="\n" if others else "", file=sys.stderr)
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
