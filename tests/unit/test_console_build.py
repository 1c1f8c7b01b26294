"""The build of the console: types of the answers that it names, a bundle like its sources, and a limited size."""

from __future__ import annotations

import json
import random
from pathlib import Path

import build_console
import pytest
from build_console import ConsoleError, check_size, differences, reduced

SCHEMAS = {
    "Run": {"properties": {"last": {"$ref": "#/components/schemas/Checkpoint"}}},
    "Checkpoint": {"properties": {"run": {"$ref": "#/components/schemas/Run"}}},
    "Other": {"type": "object"},
}


def test_the_types_are_of_what_the_console_names_and_of_what_that_refers_to() -> None:
    kept = reduced(SCHEMAS, ["Run"])["components"]["schemas"]
    assert list(kept) == ["Checkpoint", "Run"]
    with pytest.raises(ConsoleError, match=r"types\.ts names Gone, which is no schema"):
        reduced(SCHEMAS, ["Gone"])


def test_every_difference_of_a_bundle_is_found(tmp_path: Path) -> None:
    committed, built = tmp_path / "committed", tmp_path / "built"
    for folder, files in (
        (committed, {"same": "1", "old": "1", "changed": "1"}),
        (built, {"same": "1", "changed": "2"}),
    ):
        (folder / "assets").mkdir(parents=True)
        for name, content in {**files, "assets/a": "a"}.items():
            (folder / name).write_text(content)
    (built / "assets" / "new").write_text("")
    assert list(differences(committed, built)) == ["assets/new is missing", "changed differs", "old is left over"]
    assert list(differences(built, built)) == []


def test_a_bundle_that_grows_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_bytes(b"a" * 10 * build_console.MOST_COMPRESSED_BYTES)
    check_size(tmp_path)
    (tmp_path / "b.js").write_bytes(random.Random(1).randbytes(build_console.MOST_COMPRESSED_BYTES))
    with pytest.raises(ConsoleError, match="150,000 are permitted"):
        check_size(tmp_path)


def test_the_lock_names_packages_and_hashes_and_no_addresses() -> None:
    packages = json.loads(build_console.LOCK.read_text())["packages"]
    installed = {name: package for name, package in packages.items() if name}
    assert len(installed) > 50
    assert [name for name, package in installed.items() if "resolved" in package or "integrity" not in package] == []
