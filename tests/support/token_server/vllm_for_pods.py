"""vLLM's build for CPUs as a folder that pods see: on the volume of the model that they serve.

An image with it would be 5.8 GB to build, to keep, and to bring into each new cluster. This is the environment of
`make package-environments` once more, as links that take no room, for the Python of the trainer's image.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from package_environment import IMAGE_PYTHON
from support.requirements import InstalledBy, require

from .real_vllm import PLUGIN, installed_vllm

_PACKAGES = Path("lib", f"python{IMAGE_PYTHON}", "site-packages")
# The environment's own script names an interpreter of this machine.
_PROGRAM = """\
#!/bin/sh
exec "${0%/*}/python" -m vllm.entrypoints.cli.main "$@"
"""
_SETTINGS = """\
home = /usr/bin
include-system-site-packages = false
"""


def lay_out_vllm(folder: Path) -> None:
    """Makes `folder`, whose `bin/vllm` runs in the trainer's image wherever the folder is seen there.

    Skips the test where vLLM is not installed, or for another Python than the image's.
    """
    packages = installed_vllm() / _PACKAGES
    require(
        packages.is_dir(),
        f"Pods have Python {IMAGE_PYTHON}, and vLLM is installed for another: install that Python",
        InstalledBy.PACKAGE_ENVIRONMENTS,
    )
    target = folder / _PACKAGES
    target.parent.mkdir(parents=True)
    _link_tree(packages, target.parent)
    # PyTorch looks for NVIDIA's libraries beside itself.
    nvidia = find_spec("nvidia")
    for root in (nvidia.submodule_search_locations if nvidia else None) or ():
        _link_tree(Path(root), target)
    shutil.copytree(PLUGIN, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    _add_program(folder)


def _link_tree(source: Path, into: Path) -> None:
    """Beside what is there already. Copies, where `into` is on another disk."""
    links = ["--link"] if source.stat().st_dev == into.stat().st_dev else []
    subprocess.run(["cp", "--archive", "--no-clobber", *links, source, into], check=True)


def _add_program(folder: Path) -> None:
    (folder / "pyvenv.cfg").write_text(_SETTINGS)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").symlink_to("/usr/bin/python3")
    vllm = programs / "vllm"
    vllm.write_text(_PROGRAM)
    vllm.chmod(0o755)
