"""The tutorials are run, as they are, on a server with the demo's model, and say what a reader must know before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server.serve_process import API_KEY, ServedInstallation
from support.tutorials import (
    EXECUTED,
    IN_CLUSTER,
    TUTORIALS,
    executed,
    notebooks,
    pictures,
    read,
    sources_digest,
    stored_notebook,
)
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

MODEL = "demo/tiny"
"""The model's name and, where a notebook runs, its directory: so the SDK finds the tokenizer."""
FOR_READERS = ("**Time and cost**", "**For a GPU**")


def each(found: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("notebook", found, ids=lambda path: path.stem)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInstallation]:
    folder = tmp_path_factory.mktemp("served")
    served = ServedInstallation(folder / "data", {MODEL: make_tiny_model(folder / MODEL)})
    served.start()
    yield served
    served.stop()


@each([notebook for notebook in notebooks() if notebook != IN_CLUSTER])
def test_runs_to_its_end(notebook: Path, server: ServedInstallation, tmp_path: Path) -> None:
    (tmp_path / MODEL).parent.mkdir()
    (tmp_path / MODEL).symlink_to(server.models[MODEL])
    where = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "NO_PROXY": "127.0.0.1"}
    outcome = executed(notebook, tmp_path, where)
    assert pictures(outcome) == pictures(stored_notebook(notebook, outcome))


@each(notebooks())
def test_a_tutorial_shows_the_outputs_of_its_cells(notebook: Path) -> None:
    """`make tutorials` was run after the last change."""
    shown = read(notebook)
    assert shown.metadata.get(EXECUTED) == sources_digest(shown)


@each(notebooks())
def test_a_tutorial_begins_with_its_cost_and_the_differences_on_a_gpu(notebook: Path) -> None:
    first = read(notebook).cells[0].source
    assert [wanted for wanted in FOR_READERS if wanted not in first] == []


def test_the_page_lists_them_all() -> None:
    page = (TUTORIALS / "README.md").read_text()
    assert [notebook.name for notebook in notebooks() if f"({notebook.name})" not in page] == []
