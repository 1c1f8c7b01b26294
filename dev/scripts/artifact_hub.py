"""The annotations of Chart.yaml by which Artifact Hub shows the chart, and the chart as a package of a release.

Artifact_hub.py --registry REGISTRY [--out DIR] The package's default registry is REGISTRY, and its annotations name the
images there. In the checkout, the chart names no images, because none are published. `reference.py` writes the other
annotations into Chart.yaml.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from image_list import chart_images

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "tinsmith"
HELM = Path(sys.executable).with_name("helm")
CATEGORY = "ai-machine-learning"
LICENSE = "Apache-2.0"
# One example of each kind, and the folder of the CRDs.
EXAMPLES = ("session.yaml", "sampler-pool.yaml", "session-template.yaml")
DISPLAY_NAMES = {
    "TrainingSession": "Training session",
    "SamplerPool": "Sampler pool",
    "SessionTemplate": "Template of sessions",
}
MARK = "# Written by `make docs` from crds/, examples/ and CHANGELOG.md.\n"
SECTION = "Kubernetes"


def chart_file() -> str:
    """Return Chart.yaml with the present annotations."""
    return with_annotations((CHART / "Chart.yaml").read_text(), annotations())


def with_annotations(text: str, found: dict[str, str]) -> str:
    head = text.partition(MARK)[0]
    return head + MARK + yaml.dump({"annotations": found}, sort_keys=False, width=110, Dumper=_Blocks)


def annotations() -> dict[str, str]:
    return {
        "artifacthub.io/category": CATEGORY,
        "artifacthub.io/license": LICENSE,
        "artifacthub.io/operator": "true",
        "artifacthub.io/crds": _dumped(_crds()),
        "artifacthub.io/crdsExamples": _dumped(_examples()),
        "artifacthub.io/changes": _dumped([{"kind": "added", "description": change} for change in changes()]),
    }


def image_annotation(registry: str) -> dict[str, str]:
    names = [each.name for each in chart_images(registry)]
    images = [{"name": name.rpartition("/")[2].partition(":")[0], "image": name} for name in names]
    return {"artifacthub.io/images": _dumped(images)}


def changes() -> list[str]:
    """Return the first sentence of each change for Kubernetes in the newest version of CHANGELOG.md."""
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    section = newest.partition(f"\n{SECTION}")[2].partition("\n\n")[2]
    bullets = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    without_links = (re.sub(r"\s*\(\[[^\]]*\]\([^)]*\)\)|[`*]", "", bullet) for bullet in bullets)
    return [re.split(r"\.(?:\s|$)", re.sub(r"\s+", " ", bullet).strip())[0] for bullet in without_links]


def _crds() -> list[dict[str, str]]:
    found = []
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        definition: dict[str, Any] = yaml.safe_load(path.read_text())
        kind = definition["spec"]["names"]["kind"]
        [version] = definition["spec"]["versions"]
        about = version["schema"]["openAPIV3Schema"]["description"]
        found.append(
            {
                "kind": kind,
                "version": version["name"],
                "name": definition["metadata"]["name"],
                "displayName": DISPLAY_NAMES[kind],
                "description": re.sub(r"\s+", " ", about).strip(),
            }
        )
    return found


def _examples() -> list[dict[str, Any]]:
    return [each for name in EXAMPLES for each in yaml.safe_load_all((ROOT / "examples" / name).read_text())]


class _Blocks(yaml.SafeDumper):
    """A dumper that writes texts of several lines as blocks."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _block)


def _dumped(found: Any) -> str:
    text: str = yaml.safe_dump(found, sort_keys=False, width=100)
    return text


def package(registry: str, out: Path) -> str:
    """Package the chart for the images in the registry, and return Helm's message."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / CHART.name
        shutil.copytree(CHART, copy)
        chart, values = copy / "Chart.yaml", copy / "values.yaml"
        chart.write_text(with_annotations(chart.read_text(), annotations() | image_annotation(registry)))
        text, count = re.subn(r'(?m)^  registry: ""$', f"  registry: {registry}", values.read_text(), count=1)
        if count != 1:
            raise ValueError(f"{values.name} has no empty image.registry to replace")
        values.write_text(text)
        command = [HELM, "package", copy, "--destination", out]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--registry", required=True, help="registry and path of the published images")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the package; default: dist")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    print(package(options.registry, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
