"""What can be read of the images in their Dockerfiles; tests/cluster/images/ asks the images themselves."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from images.builder import BASE
from images.sources import GPU_IMAGES, IMAGES, OPTIONAL_IMAGES, ROOT, Image, version

PACKAGES = {
    "trainer": {"trainer_image/tinsmith_trainer", "rpc/tinsmith_rpc"},
    "api-server": {"api_server/tinsmith_server", "client/tinsmith", "rpc/tinsmith_rpc"},
    "operator": {"operator/tinsmith_operator", "rpc/tinsmith_rpc"},
}
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


def test_every_dockerfile_of_the_project_is_one_of_the_images() -> None:
    found = {path for path in ROOT.glob("*/Dockerfile*") if path.is_file()}
    known = {image.dockerfile for image in (IMAGES | OPTIONAL_IMAGES | GPU_IMAGES).values()}
    assert found == {path for path in known if path.parent.parent == ROOT}


def test_old_builders_can_read_it(image: Image) -> None:
    """buildah of Debian 12 knows no heredocs, and takes a line of one for an instruction."""
    assert "<<" not in image.dockerfile.read_text()


def test_everything_stands_on_one_base(image: Image) -> None:
    assert {words[1] for words in image.instructions if words[0] == "FROM"} <= {BASE, *image.stages}


@pytest.mark.parametrize("name", [*IMAGES, *OPTIONAL_IMAGES, *GPU_IMAGES])
def test_bases_have_a_tag_and_packages_a_hash(name: str) -> None:
    image = (IMAGES | OPTIONAL_IMAGES | GPU_IMAGES)[name]
    bases = {words[1] for words in image.instructions if words[0] == "FROM"} - {*image.stages, "${BASE}"}
    assert all(re.search(r":(?!latest)[\w.-]+$", base) for base in bases)
    runs = [line for line in lines(image, "RUN") if "pip" in line]
    installs = [part for run in runs for part in re.split(r"&&|;", run) if re.search(r"\bpip\b.*\binstall\b", part)]
    assert installs
    assert all("--require-hashes" in part or "--no-index" in part for part in installs)


def test_only_the_last_stage_has_no_name_so_that_pruning_keeps_the_others(image: Image) -> None:
    stages = [words for words in image.instructions if words[0] == "FROM"]
    assert len(image.stages) == len(stages) - 1 == 2
    assert "AS" not in stages[-1]


def test_it_runs_as_a_user_that_kubernetes_can_tell_is_not_root(image: Image) -> None:
    assert lines(image, "USER") == ["65532:65532"]


def test_it_takes_its_own_packages_and_no_others(image: Image) -> None:
    copied = {source for line in lines(image, "COPY") for source in line.split()[:-1]}
    assert {source for source in copied if "/tinsmith" in source and not source.startswith("--")} == PACKAGES[
        image.name
    ]


def test_only_the_trainer_has_torch(image: Image) -> None:
    assert any("torch" in line for line in lines(image, "RUN")) == (image.name == "trainer")


def test_packages_are_installed_by_hash_and_never_resolved(image: Image) -> None:
    installs = [line for line in lines(image, "RUN") if re.search(r"pip [^&]*install", line)]
    assert installs
    for line in installs:
        for command in re.findall(r"-m pip --python [^&]*", line):
            assert "--no-deps" in command
            assert "--require-hashes" in command or "--no-index" in command


def test_what_installs_packages_leaves_nothing_behind(image: Image) -> None:
    install = next(line for line in lines(image, "RUN") if "--require-hashes" in line)
    assert "purge --yes --auto-remove python3-pip" in install
    assert install.endswith("rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*")


def test_the_machines_network_settings_are_mounted_and_never_copied(image: Image) -> None:
    text = image.dockerfile.read_text()
    assert "--mount=type=secret,id=build-environment --mount=type=secret,id=ca-certificates" in text
    assert lines(image, "ARG") == []
    assert not re.search(r"(PIP_|PROXY|_proxy|CA_BUNDLE|CERT)\w*=", " ".join(lines(image, "ENV")))


def test_it_is_labelled_with_the_projects_version_and_licence(image: Image) -> None:
    labels = dict(word.split("=", 1) for line in lines(image, "LABEL") for word in shlex.split(line))
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}version"] == version()
    assert labels[f"{prefix}licenses"] == "Apache-2.0"
    assert labels[f"{prefix}title"].startswith("Tinsmith ")
    assert f"{prefix}source" not in labels


def test_its_ports_and_its_program_are_those_that_pods_are_built_for(image: Image) -> None:
    assert set(" ".join(lines(image, "EXPOSE")).split()) == PORTS[image.name]
    assert [json.loads(line) for line in lines(image, "ENTRYPOINT")] == [ENTRY_POINTS[image.name]]


def test_the_api_server_listens_to_more_than_its_own_pod() -> None:
    environment = " ".join(lines(IMAGES["api-server"], "ENV")).split()
    assert {"TINSMITH_HOST=0.0.0.0", "TINSMITH_PORT=8000"} <= set(environment)


def test_a_build_is_given_what_it_copies_and_nothing_else() -> None:
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
