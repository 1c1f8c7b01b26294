"""Promises of the images that their Dockerfiles show; tests/cluster/images/ runs the images themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from images.sources import GPU_IMAGES, IMAGES, OPTIONAL_IMAGES, ROOT, Image

PORTS = {"trainer": {"7443", "7080"}, "api-server": {"8000"}, "operator": {"8080", "9090"}}
ENTRY_POINTS = {
    "trainer": ["python3", "-m", "tinsmith_trainer"],
    "api-server": ["tinsmith", "serve"],
    "operator": ["python3", "-m", "tinsmith_operator"],
}


@pytest.fixture(params=list(IMAGES))
def image(request: pytest.FixtureRequest) -> Image:
    return IMAGES[request.param]


def lines(image: Image, instruction: str) -> list[str]:
    return [" ".join(words[1:]) for words in image.instructions if words[0] == instruction]


@pytest.mark.parametrize("name", [*IMAGES, *OPTIONAL_IMAGES, *GPU_IMAGES])
def test_bases_have_a_tag_and_packages_a_hash(name: str) -> None:
    image = (IMAGES | OPTIONAL_IMAGES | GPU_IMAGES)[name]
    bases = {words[1] for words in image.instructions if words[0] == "FROM"} - {*image.stages, "${BASE}"}
    assert all(re.search(r":(?!latest)[\w.-]+$", base) for base in bases)
    runs = [line for line in lines(image, "RUN") if "pip" in line]
    installs = [part for run in runs for part in re.split(r"&&|;", run) if re.search(r"\bpip\b.*\binstall\b", part)]
    assert installs
    assert all("--require-hashes" in part or "--no-index" in part for part in installs)


def test_packages_are_installed_by_hash_and_never_resolved(image: Image) -> None:
    installs = [line for line in lines(image, "RUN") if re.search(r"pip [^&]*install", line)]
    assert installs
    for line in installs:
        for command in re.findall(r"-m pip --python [^&]*", line):
            assert "--no-deps" in command
            assert "--require-hashes" in command or "--no-index" in command


def test_the_machines_network_settings_are_mounted_and_never_copied(image: Image) -> None:
    text = image.dockerfile.read_text()
    assert "--mount=type=secret,id=build-environment --mount=type=secret,id=ca-certificates" in text
    assert lines(image, "ARG") == []
    assert not re.search(r"(PIP_|PROXY|_proxy|CA_BUNDLE|CERT)\w*=", " ".join(lines(image, "ENV")))


def test_its_ports_and_its_program_are_those_that_pods_are_built_for(image: Image) -> None:
    assert set(" ".join(lines(image, "EXPOSE")).split()) == PORTS[image.name]
    assert [json.loads(line) for line in lines(image, "ENTRYPOINT")] == [ENTRY_POINTS[image.name]]


def test_a_build_context_has_only_the_files_that_it_copies() -> None:
    admitted = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = {
        source
        for image in (IMAGES | OPTIONAL_IMAGES | GPU_IMAGES).values()
        for line in lines(image, "COPY")
        for source in line.split()[:-1]
        if not line.startswith("--from")
    }
    assert {source for source in copied if not any(Path(source).match(pattern) for pattern in admitted)} == set()
    assert {pattern for pattern in admitted if not any(Path(source).match(pattern) for source in copied)} == set()
