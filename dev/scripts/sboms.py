"""Write a software bill of materials (CycloneDX, JSON) for the wheel and for each image, from their locks.

Sboms.py [--out DIR] The wheel and the API server's image also contain the packages of npm in the console's bundle and
in the documentation site. An image also contains its base image, whose publisher has a bill of it: the bill here names
the base. The same locks give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from image_list import bases_of
from images.sources import GPU_IMAGES, IMAGES, OPTIONAL_IMAGES
from locks import FOLDER, ROOT
from locks import IMAGES as LOCKS
from package_environment import RELEASE_TOOLS, environment_directory
from packages import MANUAL
from project_version import project_version

SPECIFICATION = "1.6"
SERVER = ROOT / "api_server" / "tinsmith_server"
WITH_SCRIPTS = {"wheel", "api-server"}
"""The products that contain the server's pages."""
BUNDLED = re.compile(r"^## (\S+) - (\S+) \(([^)]+)\)$", re.MULTILINE)
"""A package in the list of licenses that the bundler writes next to the console's bundle."""


@dataclass(frozen=True, slots=True)
class Product:
    """A wheel or an image. `base` names the base images."""

    name: str
    kind: str
    lock: Path
    base: tuple[str, ...] = ()


def products() -> Iterator[Product]:
    yield Product("wheel", "application", FOLDER / "single-machine.txt")
    for name, image in (IMAGES | OPTIONAL_IMAGES | GPU_IMAGES).items():
        if name in LOCKS:
            yield Product(name, "container", FOLDER / f"{LOCKS[name]}.txt", tuple(bases_of(image.dockerfile)))


def bill_of(product: Product) -> dict[str, object]:
    """Return the bill of cyclonedx-py for the lock, with the product as its subject."""
    program = environment_directory(RELEASE_TOOLS) / "bin" / "cyclonedx-py"
    written = ["--output-reproducible", "--spec-version", SPECIFICATION, "--output-format", "JSON"]
    command = [program, "requirements", *written, "--output-file", "-", product.lock]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    bill: dict[str, object] = json.loads(done.stdout)
    metadata = bill.setdefault("metadata", {})
    assert isinstance(metadata, dict)
    metadata["component"] = _subject(product)
    if product.name in WITH_SCRIPTS:
        components = bill["components"]
        assert isinstance(components, list)
        components += [_npm_component(*found) for found in scripts_of_pages()]
    return bill


def scripts_of_pages() -> list[tuple[str, str, str]]:
    """Return the name, version and license of each package of npm that the server's pages contain."""
    found = BUNDLED.findall((SERVER / "console_bundle" / "LICENSES.txt").read_text())
    if MANUAL.is_dir():
        lock = json.loads((ROOT / "dev" / "docs_site" / "package-lock.json").read_text())
        for path, package in lock["packages"].items():
            if path:
                found.append((path.removeprefix("node_modules/"), package["version"], package["license"]))
    return found


def _npm_component(name: str, version: str, license_id: str) -> dict[str, object]:
    purl = f"pkg:npm/{name.replace('@', '%40')}@{version}"
    licenses = [{"license": {"id": license_id}}]
    return {"bom-ref": purl, "type": "library", "name": name, "version": version, "purl": purl, "licenses": licenses}


def _subject(product: Product) -> dict[str, object]:
    name = "tinsmith" if product.name == "wheel" else f"tinsmith/{product.name}"
    subject: dict[str, object] = {
        "bom-ref": name,
        "type": product.kind,
        "name": name,
        "version": project_version(),
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    if product.base:
        subject["properties"] = [{"name": "tinsmith:base-image", "value": base} for base in product.base]
    return subject


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=re.sub(r"\s+", " ", __doc__.partition("\n\n")[0]))
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the bills; default: dist")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for product in products():
        bill = bill_of(product)
        path = options.out / f"tinsmith-{project_version()}-{product.name}.cdx.json"
        path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n")
        components = bill["components"]
        assert isinstance(components, list)
        print(f"{path}  {len(components)} packages of {product.lock.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
