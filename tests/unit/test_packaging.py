"""Tinsmith installs from a checkout as the docs say: the extras resolve, and no text points to a package index."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from images.sources import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
OVERRIDES = {Requirement(line).name for line in PYPROJECT["tool"]["uv"]["override-dependencies"]}
ON_A_SINGLE_MACHINE = {"server", "trainer", "client", "training", "cookbook", "tracing"}
FOR_CLUSTERS_RANKS_AND_DEVELOPERS = {"operator", "megatron", "dev"}


def test_the_extra_all_is_the_union_of_the_extras_of_a_single_machine() -> None:
    [all_of_them] = map(Requirement, EXTRAS["all"])
    assert (all_of_them.name, all_of_them.extras) == ("tinsmith", ON_A_SINGLE_MACHINE)
    assert EXTRAS.keys() == ON_A_SINGLE_MACHINE | FOR_CLUSTERS_RANKS_AND_DEVELOPERS | {"all"}


def test_every_extra_that_a_command_names_exists() -> None:
    groups = PYPROJECT["project"]["entry-points"].values()
    named = {
        extra for group in groups for target in group.values() for extra in re.findall(r"\w+", target.partition("[")[2])
    }
    assert named <= EXTRAS.keys()


def conflicts(extra: str) -> Iterator[str]:
    """Yield the packages that something in the extra's closure requires in another version than the environment has."""
    seen: set[tuple[str, str]] = set()
    pending = [Requirement(f"tinsmith[{extra}]")]
    while pending:
        wanted = pending.pop()
        for of in {"", *wanted.extras}:
            if (canonicalize_name(wanted.name), of) in seen:
                continue
            seen.add((canonicalize_name(wanted.name), of))
            for line in distribution(wanted.name).requires or ():
                requirement = Requirement(line)
                if requirement.marker is not None and not requirement.marker.evaluate({"extra": of}):
                    continue
                if not requirement.specifier.contains(distribution(requirement.name).version, prereleases=True):
                    yield canonicalize_name(requirement.name)
                pending.append(requirement)


def test_all_extras_but_cookbook_resolve_without_overrides() -> None:
    """With pip, the server, the trainer, the client and the library therefore install together."""
    found = {extra: set(conflicts(extra)) for extra in ON_A_SINGLE_MACHINE - {"cookbook"}}
    assert found == {extra: set() for extra in found}


def test_the_overrides_are_those_that_the_lock_needs() -> None:
    assert set(conflicts("dev")) == OVERRIDES


def test_the_environment_has_all_of_the_extra_all() -> None:
    try:
        assert set(conflicts("all")) <= OVERRIDES
    except PackageNotFoundError as missing:
        pytest.fail(f"the lock lacks {missing.name}")


def texts() -> Iterator[tuple[str, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            yield name, (ROOT / name).read_text(errors="replace")


def test_no_text_installs_tinsmith_from_a_package_index() -> None:
    """The name is registered nowhere, so that such a line may install a program of another author."""
    from_an_index = re.compile(
        r"\b(pipx? install|uvx|uv add|uv tool install)\b[^\n]*['\" ]tinsmith(\[[\w,]*\])?(['\"`]|$)", re.MULTILINE
    )
    assert [name for name, text in texts() if from_an_index.search(text)] == []


def test_no_tinsmith_image_is_named_in_a_public_registry() -> None:
    """The name is registered nowhere, so that a node may pull an image of another author."""
    public = re.compile(r"\b(docker\.io|ghcr\.io|quay\.io)/tinsmith/")
    history = ("tests/fixtures/stored/", "tests/support/operator/stored_objects.py")
    assert [name for name, text in texts() if public.search(text) and not name.startswith(history)] == []


def test_the_metadata_names_authors_audience_and_licence() -> None:
    project = PYPROJECT["project"]
    assert {"authors", "classifiers", "description", "keywords", "license", "license-files", "readme"} <= project.keys()
    supported = {name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert project["requires-python"] == ">=3.11,<3.14"
    assert supported == {"3.11", "3.12", "3.13"}


def test_the_source_distribution_has_the_sources_of_the_wheel_and_no_tests() -> None:
    build = PYPROJECT["tool"]["hatch"]["build"]["targets"]
    included = {path.removeprefix("/") for path in build["sdist"]["include"]}
    assert included >= set(build["wheel"]["packages"])
    assert all(any(path.startswith(folder) for folder in included) for path in build["wheel"]["force-include"])
    assert {path for path in included if path.split("/")[0] in {"tests", "dev", ".ci"}} == {"dev/requirements/dev.txt"}
    assert all((ROOT / path).exists() for path in included)
