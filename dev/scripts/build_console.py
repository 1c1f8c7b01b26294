"""Build the web console: build_console.py [--check | --install].

The program writes the types of the API from the server's OpenAPI document, formats, checks and tests the sources, and
builds the bundle that the server serves. With `--check`, the program changes no file, and exits with 1 if the committed
types or the committed bundle differ from those of the sources. Without Node the check is left out, except in CI. With
`--install`, the program only installs the packages, which the tests in a browser also need.
"""

from __future__ import annotations

import argparse
import filecmp
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONSOLE = ROOT / "console"
BUNDLE = ROOT / "api_server" / "tinsmith_server" / "console_bundle"
TYPES = CONSOLE / "src" / "api" / "schema.d.ts"
NAMES = TYPES.with_name("types.ts")
NAMED_SCHEMA = re.compile(r'\["schemas"\]\["(\w+)"\]')
REFERENCE = re.compile(r"#/components/schemas/(\w+)")
LOCK = CONSOLE / "package-lock.json"
INSTALLED = CONSOLE / "node_modules" / ".lock-digest"
OLDEST_NODE = (20, 19)
MOST_COMPRESSED_BYTES = 150_000
COMMIT_COMMAND = "run `make console`, and commit the result"


class ConsoleError(Exception):
    """The console cannot be built. The message says why, and what to do."""


def node_version() -> tuple[int, ...] | None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        return None
    said = subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said)[:2])


def run(command: Sequence[str], **variables: str) -> None:
    """Run a program in the folder of the sources. The output is shown only if the program fails."""
    ended = subprocess.run(
        command,
        cwd=CONSOLE,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        raise ConsoleError(f"{' '.join(command)} failed in console/:\n{ended.stdout}")


def install() -> None:
    """Install the packages of the lock file, unless they are installed already."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if INSTALLED.is_file() and INSTALLED.read_text() == digest:
        return
    run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"])
    INSTALLED.write_text(digest)


def write_types(file: Path) -> None:
    """Write the types of the answers that the console reads."""
    # Imported here, since the other steps need no server.
    from fastapi import FastAPI
    from tinsmith_server.app import ROUTES
    from tinsmith_server.routes.http.openapi import install_openapi

    app = FastAPI(routes=ROUTES)
    install_openapi(app)
    schemas = app.openapi()["components"]["schemas"]
    with tempfile.TemporaryDirectory() as scratch:
        document = Path(scratch, "openapi.json")
        document.write_text(json.dumps(reduced(schemas, NAMED_SCHEMA.findall(NAMES.read_text()))))
        run(["npx", "--no-install", "openapi-typescript", str(document), "--output", str(file)])


def reduced(schemas: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Return a document that has only the wanted schemas and those that they refer to.

    So a change of another call does not change the types. Raises ConsoleError if the server has no such schema.
    """
    kept: dict[str, Any] = {}
    pending = list(wanted)
    while pending:
        name = pending.pop()
        if name in kept:
            continue
        if name not in schemas:
            raise ConsoleError(f"{NAMES.relative_to(ROOT)} names {name}, which is no schema of the server's document")
        kept[name] = schemas[name]
        pending += REFERENCE.findall(json.dumps(schemas[name]))
    info = {"title": "Tinsmith", "version": "0"}
    return {"openapi": "3.1.0", "info": info, "paths": {}, "components": {"schemas": dict(sorted(kept.items()))}}


def build(folder: Path) -> None:
    run(["npx", "--no-install", "vite", "build", "--outDir", str(folder), "--emptyOutDir", "--logLevel", "warn"])


def check_sources() -> None:
    """Check formatting, types and accessibility rules, and run the unit tests."""
    with ThreadPoolExecutor() as pool:
        for ended in [pool.submit(run, ["npm", "run", "--silent", name]) for name in ("format-check", "check", "test")]:
            ended.result()


def compressed_bytes(folder: Path) -> int:
    return sum(len(gzip.compress(file.read_bytes(), 9)) for file in folder.rglob("*") if file.is_file())


def differences(committed: Path, built: Path) -> Iterator[str]:
    """Yield a sentence for each file that differs between two folders."""
    names = {path.relative_to(folder) for folder in (committed, built) for path in folder.rglob("*") if path.is_file()}
    for name in sorted(names):
        if not (committed / name).is_file():
            yield f"{name} is missing"
        elif not (built / name).is_file():
            yield f"{name} is left over"
        elif not filecmp.cmp(committed / name, built / name, shallow=False):
            yield f"{name} differs"


def check_size(folder: Path) -> None:
    size = compressed_bytes(folder)
    if size > MOST_COMPRESSED_BYTES:
        raise ConsoleError(f"the console has {size:,} compressed bytes, and {MOST_COMPRESSED_BYTES:,} are permitted")
    print(f"the console has {size:,} compressed bytes")


def check() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        types, bundle = Path(scratch, TYPES.name), Path(scratch, "bundle")
        with ThreadPoolExecutor() as pool:
            for ended in [pool.submit(write_types, types), pool.submit(build, bundle), pool.submit(check_sources)]:
                ended.result()
        if not TYPES.is_file() or TYPES.read_bytes() != types.read_bytes():
            raise ConsoleError(f"{TYPES.relative_to(ROOT)} is not that of the server: {COMMIT_COMMAND}")
        if found := list(differences(BUNDLE, bundle)):
            raise ConsoleError(f"{BUNDLE.relative_to(ROOT)} is not that of console/ ({found[0]}): {COMMIT_COMMAND}")
        check_size(bundle)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the committed files, and change nothing")
    parser.add_argument("--install", action="store_true", help="only install the packages of console/")
    options = parser.parse_args()
    version = node_version()
    try:
        if version is None or version < OLDEST_NODE:
            needed = f"the console needs Node {'.'.join(map(str, OLDEST_NODE))} or newer, with npm"
            if not options.check or os.environ.get("CI"):
                raise ConsoleError(f"{needed}: install it, and put it on the PATH")
            print(f"the check of the console is left out: {needed}")
            return 0
        install()
        if options.check:
            check()
        elif not options.install:
            write_types(TYPES)
            run(["npm", "run", "--silent", "format"])
            check_sources()
            build(BUNDLE)
            check_size(BUNDLE)
    except ConsoleError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
