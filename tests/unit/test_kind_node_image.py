"""The recipe of kind's node image and the program that makes it agree: on files, on images, on who is who."""

from __future__ import annotations

import re

from kind_node_image import IN_PODS, ON_THE_NODE, PODS_TAG, RECIPE
from testcluster.programs.archives import PAUSE_IMAGE
from testcluster.programs.builds import KIND, KIND_STORAGE, KUBERNETES


def test_the_program_builds_every_image_of_the_recipe() -> None:
    files = [file for file in RECIPE.rglob("*") if file.is_file()]
    named = {name for file in files for name in re.findall(r"tinsmith\.local/tinsmith/[\w-]+:\w+", file.read_text())}
    assert named == {f"tinsmith.local/tinsmith/kind-pods:{PODS_TAG}", PAUSE_IMAGE}


def test_every_program_of_the_image_is_built() -> None:
    packages = [package for program in (KUBERNETES, KIND, KIND_STORAGE) for package in program.packages]
    built = {re.sub(r"/v\d+$", "", package).rpartition("/")[2] for package in packages} - {"."}
    # The module itself.
    built.add((KIND.source / "go.mod").read_text().split("\n", 2)[1].rpartition("/")[2])
    assert {*IN_PODS.values(), *ON_THE_NODE} <= built
