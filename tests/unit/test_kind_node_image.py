"""The recipe of kind's node image and the program that makes it agree: on files, on images, on who is who."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from images.sources import Image
from kind_node_image import IN_PODS, ON_THE_NODE, PODS_TAG, RECIPE, copy_files, link
from testcluster.programs.archives import PAUSE_IMAGE
from testcluster.programs.builds import KIND, KIND_STORAGE, KUBERNETES

MANIFEST = RECIPE / "files" / "kind" / "manifests" / "default-storage.yaml"


def test_every_image_that_the_recipe_names_is_one_that_the_program_makes() -> None:
    files = [file for file in RECIPE.rglob("*") if file.is_file()]
    named = {name for file in files for name in re.findall(r"tinsmith\.local/tinsmith/[\w-]+:\w+", file.read_text())}
    assert named == {f"tinsmith.local/tinsmith/kind-pods:{PODS_TAG}", PAUSE_IMAGE}


def test_every_program_of_the_image_is_one_that_is_built() -> None:
    packages = [package for program in (KUBERNETES, KIND, KIND_STORAGE) for package in program.packages]
    built = {re.sub(r"/v\d+$", "", package).rpartition("/")[2] for package in packages} - {"."}
    # The module itself.
    built.add((KIND.source / "go.mod").read_text().split("\n", 2)[1].rpartition("/")[2])
    assert {*IN_PODS.values(), *ON_THE_NODE} <= built


def test_the_dockerfiles_take_the_folders_that_the_program_gathers() -> None:
    assert copied("pods.Dockerfile") == {"pods/"}
    assert copied("Dockerfile") == {"kind/", "files/", "programs/", "images/"}


def test_storage_is_the_default_class_under_kinds_name() -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    [storage] = [document for document in documents if document["kind"] == "StorageClass"]
    assert storage["metadata"]["name"] == "standard"
    assert storage["metadata"]["annotations"] == {"storageclass.kubernetes.io/is-default-class": "true"}
    [deployment] = [document for document in documents if document["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"][0] in IN_PODS


def test_files_of_a_module_can_be_changed_in_the_copy_and_programs_are_not_copied(tmp_path: Path) -> None:
    module = tmp_path / "module" / "etc"
    module.mkdir(parents=True)
    (module / "settings").write_text("kept\n")
    (module / "settings").chmod(0o444)
    copy_files(tmp_path / "module", tmp_path / "copy")
    copy = tmp_path / "copy" / "etc" / "settings"
    assert copy.read_text() == "kept\n"
    assert copy.stat().st_mode & 0o200
    link(tmp_path / "programs", {"etcd": module / "settings"})
    assert (tmp_path / "programs" / "etcd").samefile(module / "settings")


def copied(dockerfile: str) -> set[str]:
    instructions = Image("any", RECIPE / dockerfile, RECIPE).instructions
    return {source for words in instructions if words[0] == "COPY" for source in words[1:-1]}
