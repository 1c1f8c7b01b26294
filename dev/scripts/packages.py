"""Build the wheel and the source distribution from the tracked files, with the same bytes each time.

Packages.py [--out DIR] [--repository URL --ref REF] The wheel is built from the source distribution. The build backend
is pinned by dev/requirements/build.txt. No public repository exists yet, so relative links of the README become plain
text. With `--repository`, they become links to the files at REF, and the metadata names the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIND_UV = Path(__file__).with_name("find-uv")
MANUAL = ROOT / "api_server" / "tinsmith_server" / "manual"
"""The documentation site, if `make docs-site` has built it. It is not tracked, and it is a part of the packages."""
BUILD_LOCK = ROOT / "dev" / "requirements" / "build.txt"
RELATIVE_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?![a-z]+:|#)(?P<path>[^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Repository:
    """A public repository with the files of this release: its URL, and the tag or branch."""

    url: str
    ref: str

    def page(self, path: str) -> str:
        return f"{self.url}/blob/{self.ref}/{path}"

    def file(self, path: str) -> str:
        return f"{self.url}/raw/{self.ref}/{path}"

    @property
    def metadata(self) -> str:
        """Return the table of URLs for pyproject.toml."""
        urls = {
            "Repository": self.url,
            "Documentation": self.page("docs/README.md"),
            "Changelog": self.page("CHANGELOG.md"),
            "Issues": f"{self.url}/issues",
        }
        return "\n".join(["", "[project.urls]", *(f'{name} = "{url}"' for name, url in urls.items()), ""])


def readme_for_an_index(text: str, repository: Repository | None) -> str:
    """Return the README without relative links, which do not work on the page of a package index."""

    def replaced(link: re.Match[str]) -> str:
        if repository is None:
            return "" if link["image"] else link["text"]
        place = repository.file if link["image"] else repository.page
        return f"{link['image']}[{link['text']}]({place(link['path'])})"

    return RELATIVE_LINK.sub(replaced, text)


def copy_tracked_files(target: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def prepare(target: Path, repository: Repository | None, manual: Path | None = None) -> None:
    """Write the sources of the packages to the folder."""
    copy_tracked_files(target)
    if manual is not None:
        (target / ".gitignore").unlink()  # the build backend leaves out what this file names
        shutil.copytree(manual, target / MANUAL.relative_to(ROOT))
    readme, project = target / "README.md", target / "pyproject.toml"
    readme.write_text(readme_for_an_index(readme.read_text(), repository))
    if repository is not None:
        project.write_text(project.read_text() + repository.metadata)


def found_uv() -> str:
    return subprocess.run([FIND_UV], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def build(source: Path, out: Path, *options: str) -> list[Path]:
    """Build in a separate environment with the pinned backend, and return the packages."""
    pinned = ["--build-constraints", BUILD_LOCK, "--require-hashes"]
    subprocess.run([found_uv(), "build", "--quiet", *pinned, "--out-dir", out, *options, source], check=True)
    return sorted(path for path in out.iterdir() if path.name.startswith("tinsmith-"))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the packages; default: dist")
    parser.add_argument("--repository", metavar="URL", help="the public repository of this release")
    parser.add_argument("--ref", help="the tag of this release in that repository")
    options = parser.parse_args(arguments)
    if (options.repository is None) != (options.ref is None):
        parser.error("--repository and --ref belong together")
    repository = Repository(options.repository.rstrip("/"), options.ref) if options.repository else None
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch), repository, MANUAL if MANUAL.is_dir() else None)
        for package in build(Path(scratch), options.out):
            digest = hashlib.sha256(package.read_bytes()).hexdigest()
            print(f"{package}  {package.stat().st_size / 1e6:.1f} MB  sha256:{digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
