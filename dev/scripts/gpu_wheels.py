"""Download the packages that GPU tests import and that a PyTorch image does not contain: `make gpu-wheels`.

A machine that is borrowed for minutes often has no network, and accepts only a limited size of files. The script fills
a folder that git ignores, and checks that this folder and the work tree together are below the limit. At the end, the
script prints the command for the other machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from commits import CannotRun, commit_of

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "dev" / "requirements" / "gpu-wheels.txt"
FOLDER = ROOT / ".wheels"
MIB = 2**20
MOST_BYTES = 64 * MIB
"""The limit on the size of the tree and the wheels together."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PYTHON_VERSION = "3.12"


def download(folder: Path, lock: Path = LOCK) -> list[Path]:
    """Put the wheels of the lock, and no other files, into the folder.

    Raises CannotRun with the end of pip's output.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory() as scratch:
        # The environments of this project contain no pip.
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True)
        command = [f"{scratch}/bin/python", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        wanted = ["--no-deps", "--require-hashes", "--only-binary=:all:", f"--python-version={PYTHON_VERSION}"]
        finished = subprocess.run(
            [*command, *wanted, *platforms, f"--dest={folder}", f"--requirement={lock}"],
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode != 0:
        [*_, why] = finished.stderr.strip().splitlines() or ["pip says nothing"]
        raise CannotRun(f"the wheels of {lock.name} cannot be downloaded: {why}")
    return sorted(folder.glob("*.whl"))


def tree_bytes(tree: Path) -> int:
    """Return the size of the files that git does not ignore.

    A copy of the work tree contains all files that git does not ignore.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = (tree / name for name in listed.split("\0") if name)
    return sum(file.stat().st_size for file in files if file.is_file())


def instructions(wheels: Sequence[Path], tree: int, commit: str) -> str:
    """Return the instructions to print.

    Raises CannotRun if the tree and the wheels are larger than the transfer allows.
    """
    brought = sum(wheel.stat().st_size for wheel in wheels)
    if tree + brought > MOST_BYTES:
        raise CannotRun(
            f"the tree has {tree / MIB:.1f} MiB and the wheels {brought / MIB:.1f} MiB, more than the "
            f"{MOST_BYTES // MIB} MiB that may travel: take a package from dev/requirements/gpu-wheels.in"
        )
    folder = FOLDER.relative_to(ROOT)
    return (
        f"{len(wheels)} wheels of {brought / MIB:.1f} MiB in {folder}, and a tree of {tree / MIB:.1f} MiB: "
        f"{MOST_BYTES // MIB} MiB may travel.\n"
        f"On the machine with the GPU, in a copy of the tree with {folder}, run\n\n"
        f"    python3 dev/scripts/gpu_run.py --wheels {folder} --commit {commit} --out RESULTS\n\n"
        "and put RESULTS/gpu-runs.toml into docs/; then `make docs`."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    try:
        commit = commit_of(ROOT)
        print(instructions(download(FOLDER), tree_bytes(ROOT), commit))
    except CannotRun as error:
        print(f"gpu-wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
