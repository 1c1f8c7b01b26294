"""Look up the packages of all locks in a database of known vulnerabilities, with pip-audit and npm.

Audit.py The exit status is 0 if no package has a known vulnerability, 1 if one has, and 2 if a lock was not audited,
for example because this machine cannot reach the database.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from locks import ROOT, lock_files
from package_environment import RELEASE_TOOLS, environment_directory

OF_NPM = (ROOT / "console", ROOT / "dev" / "docs_site")
"""The folders that may have a lock of npm."""
SERVICES = ("osv", "pypi")
"""The databases that pip-audit knows, in the order of use: OSV's own, and PyPI's copy of Python's advisories."""


class NotAudited(Exception):
    """An error for a lock that no database answered for. `str(error)` ends with the reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    lock: str
    package: str
    vulnerability: str
    fixed_in: str

    def __str__(self) -> str:
        return f"{self.lock}: {self.package} has {self.vulnerability}, fixed in {self.fixed_in or 'no version yet'}"


Run = Callable[[Sequence[str | Path]], subprocess.CompletedProcess[str]]


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def python_findings(lock: Path, service: str, run: Run = run) -> list[Finding]:
    """Return the vulnerable packages of a lock. Raises NotAudited."""
    program = environment_directory(RELEASE_TOOLS) / "bin" / "pip-audit"
    resolved = ["--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    done = run([program, *resolved, "--vulnerability-service", service, "--format", "json", "--requirement", lock])
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise NotAudited(f"{lock.name} was not audited by {service}: {_reason(done)}") from None
    # pip-audit skips a package that the service does not know, and then reports no vulnerability and no error.
    if skipped := [each["skip_reason"] for each in packages if "skip_reason" in each]:
        raise NotAudited(f"{len(skipped)} packages of {lock.name} were not audited by {service}: {skipped[0]}")
    return [
        Finding(lock.name, f"{each['name']} {each['version']}", found["id"], ", ".join(found["fix_versions"]))
        for each in packages
        for found in each["vulns"]
    ]


def npm_findings(folder: Path, run: Run = run) -> list[Finding]:
    """Return the vulnerable packages of a folder's package-lock.json. Raises NotAudited."""
    done = run(["npm", "audit", "--json", "--package-lock-only", "--prefix", folder])
    lock = f"{folder.name}/package-lock.json"
    try:
        report = json.loads(done.stdout)
        packages = report["vulnerabilities"]
    except ValueError:
        raise NotAudited(f"{lock} was not audited by npm: {_reason(done)}") from None
    except KeyError:
        raise NotAudited(f"{lock} was not audited by npm: {report.get('message', _reason(done))}") from None
    return [
        Finding(lock, f"{name} {each['range']}", title, "" if each["fixAvailable"] is False else "a newer version")
        for name, each in packages.items()
        for title in [found["title"] for found in each["via"] if isinstance(found, dict)]
    ]


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of the output, which names the error."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1][-300:] if lines else f"it printed nothing and exited with {done.returncode}"


def reachable_service(lock: Path) -> str:
    """Return the first database that answers for the lock. Raises NotAudited with the reason of each."""
    reasons = []
    for service in SERVICES:
        try:
            python_findings(lock, service)
        except NotAudited as error:
            reasons.append(str(error))
        else:
            return service
    raise NotAudited("\n".join(reasons))


def audit() -> Iterator[Finding]:
    """Yield the findings of each lock. Raises NotAudited at the first lock without an answer."""
    files = lock_files()
    service = reachable_service(min(files, key=lambda lock: lock.stat().st_size))
    for lock in files:
        yield from python_findings(lock, service)
    for folder in OF_NPM:
        if (folder / "package-lock.json").is_file():
            yield from npm_findings(folder)


def main() -> int:
    findings = []
    try:
        for finding in audit():
            findings.append(finding)
            print(finding, flush=True)
    except NotAudited as error:
        print(
            f"{error}\nNot every lock was audited, so this says nothing about vulnerabilities. Run `make audit` on a "
            "machine that reaches a vulnerability database.",
            file=sys.stderr,
        )
        return 2
    print(f"{len(findings)} known vulnerabilities in {len(lock_files())} locks of Python packages")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
