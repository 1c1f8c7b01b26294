"""The documentation site of `make docs-site`: every page, working links, offline search, no request elsewhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import docs_site
import pytest
import tinsmith.training
from packages import Repository
from support.requirements import require, require_environment
from typing_extensions import override

MOST_BYTES = 10_000_000
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """The addresses that a page loads and links to, and the IDs of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.add(found.get("id", ""))
        if (address := found.get(LOADING.get(tag, ""))) is not None:
            self.loaded.append(address)
        elif tag == "a" and "href" in found:
            self.linked.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_environment("docs-site")
    require(shutil.which("npm") is not None or docs_site.DRAWING.is_file(), "npm is not installed")
    folder = tmp_path_factory.mktemp("manual")
    docs_site.build(folder, None)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def elsewhere(addresses: list[str]) -> set[str]:
    return {address for address in addresses if urlsplit(address).scheme not in {"", "data"} or address[:2] == "//"}


@pytest.mark.slow("builds the site")
def test_the_site_has_every_page_and_notebook_and_less_than_ten_megabytes(site: Path) -> None:
    sources = [
        path.relative_to(docs_site.DOCS) for path in docs_site.DOCS.rglob("*") if path.suffix in {".md", ".ipynb"}
    ]
    names = {"index" if path == Path("README.md") else path.with_suffix("").as_posix() for path in sources}
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert built == names | {"reference/api", "reference/custom-resources", "search", "genindex"}
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < MOST_BYTES


@pytest.mark.slow("builds the site")
def test_no_page_style_or_script_loads_anything_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    assert {path.name: found for path, page in pages.items() if (found := elsewhere(page.loaded))} == {}
    for style in site.rglob("*.css"):
        text = style.read_text()
        assert elsewhere(re.findall(r"url\([\"']?([^\"')]+)", text)) == set(), style
        assert "@import" not in text, style
    for page in pages:
        assert set(re.findall(r"(?:fetch|import|importScripts)\(\s*[\"'](\w+:[^\"']+)", page.read_text())) == set()


@pytest.mark.slow("builds the site")
def test_every_link_and_file_of_a_page_is_there(site: Path, pages: dict[Path, Page]) -> None:
    missing = []
    for path, page in pages.items():
        for address in [*page.loaded, *page.linked]:
            parts = urlsplit(address)
            if parts.scheme or address == "../docs":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].ids if target in pages else set()
            if not target.is_file() or (parts.fragment and target in pages and parts.fragment not in anchors):
                missing.append((path.relative_to(site).as_posix(), address))
    assert missing == []


@pytest.mark.slow("builds the site")
def test_notebooks_have_their_pictures_a_formula_without_a_script_and_diagrams_are_drawn(site: Path) -> None:
    for notebook in (docs_site.DOCS / "tutorials").glob("*.ipynb"):
        text = (site / "tutorials" / f"{notebook.stem}.html").read_text()
        assert ("image/png" in notebook.read_text()) == ("../_images/" in text), notebook.name
    assert "<math" in (site / "tutorials" / "3_dpo.html").read_text()
    design = (site / "design.html").read_text()
    assert design.count('<pre class="mermaid">') == (docs_site.DOCS / "design.md").read_text().count("```mermaid")
    assert 'src="_static/mermaid.tiny.js"' in design


@pytest.mark.slow("builds the site")
def test_search_and_the_reference_know_each_name_of_the_training_library(site: Path) -> None:
    reference, index = (site / "reference" / "api.html").read_text(), (site / "searchindex.js").read_text()
    assert [name for name in tinsmith.training.__all__ if f'id="tinsmith.training.{name}"' not in reference] == []
    assert "CheckpointManager" in index
    assert "quarantined" in index or "quarantin" in index


@pytest.mark.slow("runs Sphinx")
def test_a_link_to_a_heading_that_does_not_exist_fails_the_build(tmp_path: Path) -> None:
    require_environment("docs-site")
    (tmp_path / "index.md").write_text("# Title\n\n[here](#nowhere)\n")
    with pytest.raises(docs_site.CannotBuild, match=r"docs/index\.md.*nowhere"):
        docs_site.run_sphinx(tmp_path, tmp_path / "out")


def texts() -> Iterator[tuple[str, str, str]]:
    yield (
        "[a](../design.md#life) [b](../../dev/x.py)",
        "[a](../design.md#life) b",
        "[b](https://code.example/t/blob/v1/dev/x.py)",
    )
    yield (
        "[c](../README.md#decisions) ![d](../pictures/first_steps.png)",
        "[c](../index.md#decisions) ![d](../pictures/first_steps.png)",
        "",
    )
    yield "[e](#here) [f](https://example.com/a.md)", "[e](#here) [f](https://example.com/a.md)", ""
    yield "```\n[g](../../dev/x.py)\n```\n", "```\n[g](../../dev/x.py)\n```\n", ""


@pytest.mark.parametrize(("text", "written", "public"), list(texts()))
def test_links_lead_to_pages_of_the_site_or_to_the_public_repository(text: str, written: str, public: str) -> None:
    assert docs_site.page(text, "how-to/some.md", None) == written
    assert public in docs_site.page(text, "how-to/some.md", Repository("https://code.example/t", "v1"))
