"""The tools of a release: images and chart by name, locks and their changes, audits and bills of materials."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import artifact_hub
import audit
import image_list
import locks
import pytest
import sboms
import yaml
from support.kubernetes.charts import HELM, render
from support.requirements import require_environment

REGISTRY = "registry.example.com/team"
WORKFLOW = image_list.ROOT / ".github" / "workflows" / "release.yml"


def images_in(found: Any) -> set[str]:
    """Return every image that a manifest names, in a container or in an argument or variable of the operator."""
    if isinstance(found, dict):
        return set().union(*map(images_in, found.values()))
    if isinstance(found, list):
        return set().union(*map(images_in, found))
    return set(re.findall(rf"{re.escape(REGISTRY)}/[\w./-]+:[\w.-]+", found)) if isinstance(found, str) else set()


def test_the_list_for_an_air_gapped_cluster_has_every_image_of_a_release() -> None:
    listed = {each.name for each in image_list.chart_images(REGISTRY)}
    assert images_in(render({"image": {"registry": REGISTRY}})) == listed


def test_the_list_has_the_base_image_of_every_dockerfile() -> None:
    listed = {each.name for each in image_list.base_images()}
    for image in (image_list.IMAGES | image_list.GPU_IMAGES).values():
        text = image.dockerfile.read_text()
        outside = set(re.findall(r"^(?:FROM |ARG BASE=)(\S+/\S+)", text, re.MULTILINE))
        assert outside <= listed
    assert "your image, by --build-arg BASE" in listed


def test_the_annotations_of_the_chart_name_its_crds_and_valid_examples_of_each() -> None:
    annotations = yaml.safe_load((artifact_hub.CHART / "Chart.yaml").read_text())["annotations"]
    crds = yaml.safe_load(annotations["artifacthub.io/crds"])
    examples = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    assert {each["kind"] for each in crds} == {each["kind"] for each in examples}
    assert {each["name"] for each in crds} == {
        yaml.safe_load(path.read_text())["metadata"]["name"] for path in (artifact_hub.ROOT / "crds").glob("*.yaml")
    }
    assert all(set(each) == {"kind", "description"} for each in yaml.safe_load(annotations["artifacthub.io/changes"]))
    assert "artifacthub.io/images" not in annotations, "no image is published"


def test_the_packaged_chart_installs_the_published_images_without_further_values(tmp_path: Path) -> None:
    artifact_hub.package(REGISTRY, tmp_path)
    [package] = tmp_path.glob("*.tgz")
    shown = subprocess.run([HELM, "show", "chart", package], capture_output=True, text=True, check=True).stdout
    named = yaml.safe_load(yaml.safe_load(shown)["annotations"]["artifacthub.io/images"])
    rendered = subprocess.run(
        [HELM, "template", "tinsmith", package], capture_output=True, text=True, check=True
    ).stdout
    assert images_in(list(yaml.safe_load_all(rendered))) == {each["image"] for each in named}


def test_a_change_of_versions_is_one_row_with_all_locks_that_have_it() -> None:
    before = {name: locks.pins_of("a==1\nB_c[x]==1 \\\n    --hash=sha256:0\n") for name in ("dev", "image")}
    after = {"dev": locks.pins_of("a==2\nb-c==1"), "image": locks.pins_of("a==2\nb-c==1\nd==3")}
    assert locks.changes(before, after) == [("a", "1", "2", "dev, image"), ("d", "-", "3", "image")]


def answering(output: str, error: str = "") -> audit.Run:
    def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, output, error)

    return run


LOCK = locks.FOLDER / "build.txt"


def test_a_lock_that_no_database_answered_for_is_not_reported_as_free_of_vulnerabilities() -> None:
    with pytest.raises(audit.NotAudited, match=r"build\.txt was not audited by osv: ConnectionError: no route"):
        audit.python_findings(LOCK, "osv", answering("", "Traceback\nConnectionError: no route\n"))
    skipped = json.dumps({"dependencies": [{"name": "a", "skip_reason": "a is not found"}]})
    with pytest.raises(audit.NotAudited, match=r"1 packages of build\.txt were not audited by pypi: a is not found"):
        audit.python_findings(LOCK, "pypi", answering(skipped))
    with pytest.raises(audit.NotAudited, match=r"console/package-lock\.json was not audited by npm: 405 Method"):
        audit.npm_findings(audit.OF_NPM[0], answering('{"message": "405 Method Not Allowed"}'))


def test_a_finding_names_the_lock_the_package_and_the_version_with_the_fix() -> None:
    vulnerable = {"name": "a", "version": "1", "vulns": [{"id": "GHSA-1", "fix_versions": ["2", "3"]}]}
    report = json.dumps({"dependencies": [vulnerable, {"name": "b", "version": "1", "vulns": []}]})
    [finding] = audit.python_findings(LOCK, "osv", answering(report))
    assert str(finding) == "build.txt: a 1 has GHSA-1, fixed in 2, 3"

    direct = {"range": "<2", "fixAvailable": False, "via": [{"title": "Prototype pollution"}]}
    through_it = {"range": "*", "fixAvailable": True, "via": ["direct"]}
    of_npm = json.dumps({"vulnerabilities": {"direct": direct, "other": through_it}})
    [finding] = audit.npm_findings(audit.OF_NPM[0], answering(of_npm))
    assert str(finding) == "console/package-lock.json: direct <2 has Prototype pollution, fixed in no version yet"


@pytest.mark.slow("cyclonedx-py takes seconds for a lock")
def test_each_bill_of_materials_has_exactly_the_packages_of_its_lock() -> None:
    require_environment("release-tools")
    products = {product.name: product for product in sboms.products()}
    assert products.keys() == {"wheel", *locks.IMAGES}
    for name in ("trainer-miles", "operator"):
        bill: Any = sboms.bill_of(products[name])
        packages = {(each["name"], each["version"]) for each in bill["components"]}
        pins = locks.pins_of(products[name].lock.read_text())
        assert {(re.sub(r"[-_.]+", "-", package).lower(), version) for package, version in packages} == {
            (package, version) for package, versions in pins.items() for version in versions
        }
        assert bill["metadata"]["component"]["version"] == sboms.project_version()
        assert not [each for each in packages if each[0] == "svelte"]
    again = sboms.bill_of(products["operator"])
    assert bill == again, "the same lock gives the same bill"


def test_the_bills_of_wheel_and_api_server_name_the_packages_in_the_console_as_its_lock_has_them() -> None:
    lock = json.loads((locks.ROOT / "console" / "package-lock.json").read_text())["packages"]
    bundled = {name: version for name, version, _ in sboms.scripts_of_pages() if f"node_modules/{name}" in lock}
    assert bundled.keys() >= {"svelte", "uplot"}
    assert bundled == {name: lock[f"node_modules/{name}"]["version"] for name in bundled}
    assert {"wheel", "api-server"} == sboms.WITH_SCRIPTS


def test_the_lock_of_a_single_machine_has_the_versions_of_the_tests() -> None:
    tests, wheel = (locks.pins_of((locks.FOLDER / name).read_text()) for name in ("dev.txt", "single-machine.txt"))
    assert {name: tests.get(name) for name in wheel} == wheel


def test_the_release_workflow_pins_actions_names_no_registry_and_uses_targets_that_exist() -> None:
    text = WORKFLOW.read_text()
    workflow = yaml.safe_load(text)
    actions = re.findall(r"uses: (\S+)", text)
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in actions)
    assert workflow["jobs"]["build"]["if"] == "vars.RELEASES == 'enabled'"
    assert workflow["permissions"] == {"contents": "read"}
    named = set(re.findall(r"\b(?:[\w-]+\.)+(?:com|io|org|net|dev)\b", re.sub(r"#.*", "", text)))
    assert named == {"github.com"}, "only the source of cosign"
    targets = set(re.findall(r"^([a-z-]+):", (image_list.ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"(?m)(?:^\s*|run: )make ((?:[a-z-]+ ?)+)", text)
    assert commands
    assert {target for command in commands for target in command.split()} <= targets
