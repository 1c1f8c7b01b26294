"""The locks of the images hold what the packages' extras ask for, in the versions that the tests run."""

from __future__ import annotations

import re
import tomllib

import pytest
from images.sources import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = {"trainer": "trainer", "api-server": "server", "operator": "operator"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHON = {"python_version": "3.13", "python_full_version": "3.13.5", "sys_platform": "linux", "extra": ""}
FROM_DEBIAN = {"numpy", "torch"}


def locked(name: str) -> dict[str, str]:
    """Return the versions for Python 3.13 on Linux."""
    text = (ROOT / "dev" / "requirements" / name).read_text()
    entries = [Requirement(line.removesuffix("\\")) for line in re.findall(r"^\w.*", text, re.MULTILINE)]
    return {
        canonicalize_name(entry.name): str(entry.specifier).removeprefix("==")
        for entry in entries
        if entry.marker is None or entry.marker.evaluate(PYTHON)
    }


def requirements_of(extra: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    return [Requirement(line) for line in lines]


@pytest.fixture(params=list(EXTRAS))
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_image_gets_all_that_its_extra_asks_for(image: str) -> None:
    versions = locked(f"{image}-image.txt")
    wrong = [
        str(requirement)
        for requirement in requirements_of(EXTRAS[image])
        if requirement.name not in FROM_DEBIAN
        and not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_an_image_runs_the_versions_that_the_tests_run(image: str) -> None:
    tested = locked("dev.txt")
    assert {name: at for name, at in locked(f"{image}-image.txt").items() if tested.get(name) != at} == {}


def test_every_package_of_an_images_lock_has_a_hash(image: str) -> None:
    entries = re.split(r"\n(?=\w)", (ROOT / "dev" / "requirements" / f"{image}-image.txt").read_text())
    assert len(entries) > 20
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_lock_leaves_out_exactly_the_packages_of_debian() -> None:
    text = (ROOT / "dev" / "requirements" / "trainer-image-overrides.txt").read_text()
    assert set(re.findall(r"^(\w+) ;", text, re.MULTILINE)) == FROM_DEBIAN
