"""The lock files of dev/requirements: their packages, and a table of the changes since a commit.

Locks.py [COMMIT] The program prints each package whose version differs from that at the commit (default: HEAD).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dev" / "requirements"
PINNED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)
IMAGES = {
    "api-server": "api-server-image",
    "operator": "operator-image",
    "trainer": "trainer-image",
    "trainer-megatron": "trainer-megatron-image",
    "trainer-gpu": "gpu-image",
    "trainer-miles": "miles-image",
    "trainer-nemo-rl": "nemo-rl-image",
}
"""The lock of each image. The locks of the three images for GPUs have only what these images add to their base."""

Pins = Mapping[str, frozenset[str]]


def lock_files() -> list[Path]:
    """Return the locks, without the lists of overrides, which have no hashes."""
    return [path for path in sorted(FOLDER.glob("*.txt")) if "--hash=" in path.read_text()]


def pins_of(text: str) -> Pins:
    """Return the versions of each package. A lock for several platforms may have more than one."""
    pins: dict[str, frozenset[str]] = {}
    for name, version in PINNED.findall(text):
        key = re.sub(r"[-_.]+", "-", name).lower()
        pins[key] = pins.get(key, frozenset()) | {version}
    return pins


def changes(before: Mapping[str, Pins], after: Mapping[str, Pins]) -> list[tuple[str, str, str, str]]:
    """Return the package, both versions and the names of the locks, for each change."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for lock in sorted(before.keys() | after.keys()):
        old, new = before.get(lock, {}), after.get(lock, {})
        for name in sorted(old.keys() | new.keys()):
            versions = _written(old.get(name)), _written(new.get(name))
            if versions[0] != versions[1]:
                found.setdefault((name, *versions), []).append(lock)
    return [(*change, ", ".join(found[change])) for change in sorted(found)]


def _written(versions: Iterable[str] | None) -> str:
    return " and ".join(sorted(versions)) if versions else "-"


def _pins_at(commit: str) -> dict[str, Pins]:
    names = _git("ls-tree", "--name-only", commit, "dev/requirements/").splitlines()
    texts = {Path(name).stem: _git("show", f"{commit}:{name}") for name in names if name.endswith(".txt")}
    return {name: pins_of(text) for name, text in texts.items() if "--hash=" in text}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: list[str]) -> int:
    [commit] = arguments or ["HEAD"]
    rows = changes(_pins_at(commit), {path.stem: pins_of(path.read_text()) for path in lock_files()})
    if not rows:
        print(f"The locks have the same versions as at {commit}.")
        return 0
    print("| Package | From | To | Locks |\n| --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
