"""The requirements of the Miles image on its base, run against stand-ins of one.

test_rank_images.py has what it shares with the image of NeMo RL.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from images.sources import ROOT
from support.base_images import OnABase

MILES = OnABase("miles")
TREES = {
    "/root/miles": MILES.versions["commit"],
    "/root/Megatron-LM": MILES.versions["megatron"]["commit"],
    "/sgl-workspace/sglang": MILES.versions["sglang"]["commit"],
}
RAY = MILES.versions["ray"]["version"]
BRIDGE = MILES.versions["megatron-bridge"]["commit"]
ARGUMENTS = {
    "MILES_COMMIT": MILES.versions["commit"],
    "MEGATRON_COMMIT": MILES.versions["megatron"]["commit"],
    "SGLANG_COMMIT": MILES.versions["sglang"]["commit"],
    "BRIDGE_COMMIT": BRIDGE,
    "RAY_VERSION": RAY,
}
PYTHON = """case "$2" in
*vcs_info*) echo {bridge} ;;
*ray*) echo {ray} ;;
*flash_attn_interface*) echo "{flash_attention}" ;;
*) echo "python3 $@" >> {base}/done ;;
esac"""


def check_of(
    base: Path, trees: dict[str, str], *, ray: str = RAY, bridge: str = BRIDGE, flash_attention: str = "None"
) -> subprocess.CompletedProcess[str]:
    """Run the first RUN of the Dockerfile on a stand-in of the base.

    Git reports these trees' commits, Python has these packages, and every change is recorded.
    """
    heads = "".join(f'[ "$2" = {tree} ] && echo {commit} && exit\n' for tree, commit in trees.items())
    programs = {
        "git": f'{heads}echo "fatal: cannot change to $2" >&2; exit 128',
        "python3": PYTHON.format(base=base, ray=ray, bridge=bridge, flash_attention=flash_attention),
        "chmod": f'echo "chmod $@" >> {base}/done',
        "useradd": f'echo "useradd $@" >> {base}/done',
    }
    for name, script in programs.items():
        (base / name).write_text(f"#!/bin/sh\n{script}\n")
        (base / name).chmod(0o755)
    environment = {**ARGUMENTS, "PATH": f"{base}:{os.environ['PATH']}"}
    command = ["sh", "-c", MILES.lines("RUN")[0]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_commits_are_those_that_the_assumptions_are_about() -> None:
    read = tomllib.loads((ROOT / "tests" / "support" / "miles" / "assumptions.toml").read_text())
    assert (read["miles"], read["megatron"]) == (ARGUMENTS["MILES_COMMIT"], ARGUMENTS["MEGATRON_COMMIT"])


def test_a_base_of_the_commits_that_were_read_is_taken(tmp_path: Path) -> None:
    assert check_of(tmp_path, TREES).returncode == 0
    done = (tmp_path / "done").read_text().splitlines()
    assert done[0] == "python3 -m pip uninstall --yes flash_attn_3"
    assert done[1] == "chmod a+rx /root"
    assert done[2].startswith("useradd --uid 65532 ")


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("commit", ["f" * 40, None], ids=["another commit", "no tree"])
def test_another_base_is_refused_while_building(tree: str, commit: str | None, tmp_path: Path) -> None:
    trees = {name: at for name, at in {**TREES, tree: commit}.items() if at is not None}
    assert check_of(tmp_path, trees).returncode != 0
    assert not (tmp_path / "done").exists()


def test_flash_attention_3_that_stays_under_another_name_is_not_built_upon(tmp_path: Path) -> None:
    """pip is content to take nothing away."""
    assert check_of(tmp_path, TREES, flash_attention="ModuleSpec(name='flash_attn_interface')").returncode != 0
