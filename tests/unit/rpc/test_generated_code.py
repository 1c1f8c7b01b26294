"""The committed protobuf code is what its sources generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_regeneration_changes_no_byte(tmp_path: Path) -> None:
    (tmp_path / "tinsmith_rpc").mkdir()
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([ROOT / "dev" / "scripts" / "generate-code", tmp_path], env=environment, check=True)
    generated = {path.name: path.read_text() for path in (tmp_path / "tinsmith_rpc").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "rpc" / "tinsmith_rpc").glob("*_pb2*.py*")}
    assert generated == committed
