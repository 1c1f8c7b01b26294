"""One server with the hub's base models, and the directory in which every program runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from support.recipes.names import LLAMA
from support.recipes.program import models_for
from support.recipes.running import Runner
from support.recipes.workshop import workshop
from support.requirements import InstalledBy, require


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Return a runner with the models of this run's programs, and LLAMA for the tests without a program."""
    for package in ("tinker_cookbook", "pyarrow"):
        found = importlib.util.find_spec(package) is not None
        require(found, f"{package}, which the recipes import, is not installed", InstalledBy.VENV)
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    models = models_for(each["program"] for each in parameters if "program" in each) | {LLAMA}
    with workshop(tmp_path_factory.mktemp("recipes"), models) as made:
        yield made
