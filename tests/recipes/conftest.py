"""One server with two base models, and the directory in which every recipe runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from support.client.offline_hub import OfflineHub, make_offline_hub
from support.client.recipes import RecipeRunner
from support.requirements import require
from support.server.serve_process import ServedInstallation


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> OfflineHub:
    for package in ("tinker_cookbook", "pyarrow"):
        require(importlib.util.find_spec(package) is not None, f"the recipes need {package}: `make venv` installs it")
    return make_offline_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="session")
def server(hub: OfflineHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    installation = ServedInstallation(tmp_path_factory.mktemp("served"), hub.models)
    try:
        yield installation.start()
    finally:
        installation.stop()


@pytest.fixture(scope="session")
def recipes(server: ServedInstallation, hub: OfflineHub, tmp_path_factory: pytest.TempPathFactory) -> RecipeRunner:
    return RecipeRunner(server, hub.directory, tmp_path_factory.mktemp("recipes"))
