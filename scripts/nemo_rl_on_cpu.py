"""Runs the tests of the real NeMo RL on this machine's CPU: `make test-nemo-rl NEMO_RL=… BRIDGE=… MEGATRON=…`.

The sources are checkouts at the commits of trainer_image/versions.toml, which package indexes do not have; what they
import is installed by package_environment.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import package_environment

ROOT = Path(__file__).parents[1]
VERSIONS = ROOT / "trainer_image" / "versions.toml"
SHIMS = ROOT / "tests" / "support" / "nemo_rl" / "on_cpu"
TESTS = "tests/real_nemo_rl"


@dataclass(frozen=True, slots=True)
class Source:
    """A repository that the tests run: its section in versions.toml, and the folder in it that Python imports from."""

    section: str
    variable: str
    imports: str = "."

    @property
    def flag(self) -> str:
        return f"--{self.variable.lower().replace('_', '-')}"


SOURCES = (
    Source("nemo-rl", "NEMO_RL"),
    Source("megatron-bridge", "BRIDGE", "src"),
    Source("megatron-lm", "MEGATRON"),
)


class SourceMissing(Exception):
    """A sentence: what is not there, and what is wanted."""


def check_source(source: Source, path: str, wanted: Mapping[str, str]) -> Path:
    """The checkout, whose commit is `wanted`'s. Raises SourceMissing."""
    clone = f"git clone {wanted['repository']} && git checkout {wanted['commit']}"
    if not path:
        raise SourceMissing(f"{source.variable} is not given: the path of a checkout made by `{clone}`.")
    checkout = Path(path).expanduser().resolve()
    asked = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    found = asked.stdout.strip()
    if asked.returncode or found != wanted["commit"]:
        what = f"is at {found}" if not asked.returncode else "is no checkout of git's"
        raise SourceMissing(f"{source.variable}={path} {what}, and the tests are for {wanted['commit']}: `{clone}`.")
    return checkout


def environment_of_tests(checkouts: Sequence[Path]) -> dict[str, str]:
    """The shims come first: Python looks for one sitecustomize alone."""
    imports = [SHIMS, *checkouts, ROOT / "trainer_image", ROOT / "rpc"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in imports),
        "LD_LIBRARY_PATH": package_environment.lent_libraries(),
        "OMP_NUM_THREADS": "1",
        # Virtual machines can offer AMX, which oneDNN takes for bfloat16, and kill who uses it.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "TORCH_COMPILE_DISABLE": "1",  # else each rank compiles C++ for what Megatron fuses
        "WANDB_MODE": "disabled",
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for source in SOURCES:
        parser.add_argument(source.flag, dest=source.variable, default="", help=f"a checkout of {source.section}")
    given, for_pytest = parser.parse_known_args(arguments)
    versions = tomllib.loads(VERSIONS.read_text())
    try:
        checkouts = [
            check_source(source, getattr(given, source.variable), versions[source.section]) / source.imports
            for source in SOURCES
        ]
    except SourceMissing as missing:
        print(missing, file=sys.stderr)
        return 2
    if failed := package_environment.main([package_environment.NEMO_RL.name]):
        return failed
    python = package_environment.environment_directory(package_environment.NEMO_RL) / "bin" / "python"
    # Their warnings, of hundreds of modules, are not ours to mend.
    pytest = [str(python), "-m", "pytest", "-W", "ignore", "-m", "nemo_rl", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*pytest, *(for_pytest or [TESTS])], cwd=ROOT, env=environment_of_tests(checkouts), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
