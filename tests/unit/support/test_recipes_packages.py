"""Programs that need other versions than ours find those first, and what else they import where ours do."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

from support.recipes.program import WITH_EXTRAS, Program, own_tests

PRINT = "import json, packaging, openai; print(json.dumps([openai.__file__, packaging.__file__]))"


def test_packages_of_an_environment_come_before_ours_and_the_rest_is_ours(tmp_path: Path) -> None:
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path), "platbase": str(tmp_path)}))
    packages.mkdir(parents=True)
    theirs = packages / "openai.py"
    theirs.write_text("")
    command = [sys.executable, WITH_EXTRAS[0], str(tmp_path), "-c", PRINT]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert found[0] == str(theirs)
    assert Path(found[1]).is_file()
    assert not Path(found[1]).is_relative_to(tmp_path)


def test_the_page_shows_the_same_arguments_with_and_without_them() -> None:
    with_them: Program = own_tests("tests/a.py", [], [], with_extras=True)
    assert with_them.arguments == own_tests("tests/a.py", [], []).arguments
    assert with_them.command[:2] == WITH_EXTRAS
