"""Build the documentation as a site that works offline: pages, notebooks, search, the library's API, and all CRDs.

Docs_site.py [--out DIR] [--repository URL --ref REF] Sphinx builds copies of the pages; a warning, such as a link to a
page or heading that does not exist, fails the build. Links to files outside docs/ become plain text, or links to a
public repository. An API server that is installed afterwards serves the site at /manual/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from html import escape
from pathlib import Path
from posixpath import normpath

import yaml
from package_environment import DOCS_SITE, environment_directory
from packages import MANUAL, Repository
from resource_reference import field_rows

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIGURATION = ROOT / "dev" / "docs_site"
DRAWING = CONFIGURATION / "node_modules" / "@mermaid-js" / "tiny" / "dist" / "mermaid.tiny.js"
SCRIPTS = (DRAWING, CONFIGURATION / "static" / "diagrams.js")
"""The scripts of pages with diagrams."""
PICTURES = {".png", ".jpg", ".svg", ".webp"}
SOURCES = {".md", ".ipynb", *PICTURES}
INDEX, ROOT_PAGE = "README.md", "index.md"
API_PAGE = "reference/api.rst"
RESOURCES_PAGE = "reference/custom-resources.md"
CRDS = ROOT / "crds"
LIBRARY = "tinsmith.training"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)")
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIAGRAM_BEGIN = '<pre class="mermaid">'
FORMULA = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)


class CannotBuild(Exception):
    """An error whose message says what is wrong or missing."""


def stage(target: Path, repository: Repository | None = None) -> None:
    """Write the pages as Sphinx reads them."""
    for path in sorted(DOCS.rglob("*")):
        name = path.relative_to(DOCS).as_posix()
        copy = target / (ROOT_PAGE if name == INDEX else name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(page(path.read_text(), name, repository))
        elif path.suffix == ".ipynb":
            copy.write_text(notebook(path.read_text(), name, repository))
        elif path.suffix in PICTURES:
            shutil.copy(path, copy)
    index = target / ROOT_PAGE
    index.write_text(index.read_text() + contents((DOCS / INDEX).read_text()))
    (target / API_PAGE).write_text(api_page())
    (target / RESOURCES_PAGE).write_text(resources_page())


def page(text: str, name: str, repository: Repository | None) -> str:
    """Return the text with links that work in the site, and with drawn diagrams. Code blocks stay unchanged."""
    parts = re.split(r"(^```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    written = "".join(
        _relinked(part, name, repository) if not part.startswith("```") else DIAGRAM.sub(_diagram, part)
        for part in parts
    )
    if written.count(DIAGRAM_BEGIN) == 0:
        return written
    static = "../" * name.count("/") + "_static"
    scripts = "\n".join(f'<script src="{static}/{script.name}"></script>' for script in SCRIPTS)
    return f"{written}\n\n```{{raw}} html\n{scripts}\n```\n"


def _diagram(block: re.Match[str]) -> str:
    return f"```{{raw}} html\n{DIAGRAM_BEGIN}\n{escape(block[1])}</pre>\n```"


def _relinked(text: str, name: str, repository: Repository | None) -> str:
    def replaced(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        if not target or "://" in target:
            return link[0]
        place = normpath(f"docs/{name}/../{target}")
        if place.startswith("docs/") and (ROOT / place).is_file() and Path(place).suffix in SOURCES:
            known = re.sub(rf"(^|/){INDEX}$", rf"\1{ROOT_PAGE}", target) if place == f"docs/{INDEX}" else target
            return f"{link['image']}[{link['text']}]({known}{'#' + anchor if anchor else ''})"
        return link["text"] if repository is None else f"[{link['text']}]({repository.page(place)})"

    return LINK.sub(replaced, text)


def notebook(text: str, name: str, repository: Repository | None) -> str:
    found = json.loads(text)
    found["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}  # cells call programs with !
    for cell in found["cells"]:
        if cell["cell_type"] == "markdown":
            source = page("".join(cell["source"]), name, repository)
            cell["source"] = FORMULA.sub(lambda formula: _mathml(formula[1]), source)
    return json.dumps(found)


def _mathml(formula: str) -> str:
    """Return the formula as MathML, which browsers show without a script."""
    from latex2mathml.converter import convert

    return str(convert(formula.strip(), display="block"))


def contents(index: str) -> str:
    """Return a table of contents for each section of docs/README.md, for the navigation."""
    tables = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        caption = section.partition("\n")[0].partition(":")[0]
        names: list[str] = re.findall(r"\]\(([^)#]+\.md)\)", section)
        if caption == "Tutorials":
            names += [f"tutorials/{path.name}" for path in sorted((DOCS / "tutorials").glob("*.ipynb"))]
        if caption == "Reference":
            names += [API_PAGE, RESOURCES_PAGE]
        tables.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"]))
    return "\n\n".join([_API_LINKS, *tables, ""])


_API_LINKS = """
## In this site

- [API of the training library](reference/api.rst): its classes and functions.
- [Custom resources](reference/custom-resources.md): each field of the definitions.
- <a href="../docs">All calls of this server</a> as an OpenAPI page, if an API server serves this site.
"""


def api_page() -> str:
    """Return a page with each public name of the training library."""
    sys.path.insert(0, str(ROOT / "client"))
    from importlib import import_module

    library = import_module(LIBRARY)
    title = "API of the training library"
    lines = [title, "=" * len(title), "", f"Import these names from ``{LIBRARY}``.", ""]
    for name in sorted(library.__all__):
        member = getattr(library, name)
        kind = "autoclass" if isinstance(member, type) else "autofunction" if callable(member) else "autodata"
        lines += [name, "-" * len(name), "", f".. {kind}:: {LIBRARY}.{name}", ""]
    return "\n".join(lines)


def resources_page() -> str:
    """Return a page with each field of the custom resource definitions."""
    parts = ["# Custom resources"]
    for crd in sorted(CRDS.glob("*.yaml")):
        names = yaml.safe_load(crd.read_text())["spec"]["names"]
        rows = [row for part in ("spec", "status") for row in field_rows(crd, part)]
        table = ["| Field | Type | Default | Meaning |", "|---|---|---|---|", *(_row(cells) for cells in rows)]
        parts.append("\n".join([f"## {names['kind']}", "", *table]))
    return "\n\n".join(parts) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def build(out: Path, repository: Repository | None) -> None:
    """Write the site to the folder. Raises CannotBuild for a warning of Sphinx."""
    install_drawing()
    sys.path.append(str(_packages()))
    with tempfile.TemporaryDirectory() as scratch:
        pages, site = Path(scratch) / "pages", Path(scratch) / "site"
        stage(pages, repository)
        run_sphinx(pages, site)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(site, out, ignore=shutil.ignore_patterns("_sources"))
    for script in SCRIPTS:
        shutil.copy(script, out / "_static")


def run_sphinx(pages: Path, out: Path) -> None:
    """Run Sphinx from its own environment in this Python, which has the training library. Raises CannotBuild."""
    options = ["-W", "--keep-going", "--quiet", "--builder", "html", "--conf-dir", str(CONFIGURATION)]
    with tempfile.TemporaryDirectory() as doctrees:
        done = subprocess.run(
            [sys.executable, "-m", "sphinx", *options, "--doctree-dir", doctrees, str(pages), str(out)],
            env=os.environ | {"PYTHONPATH": str(_packages()), "PYTHONWARNINGS": "ignore"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise CannotBuild(
            f"the site is not built, because Sphinx reports:\n{done.stderr.replace(f'{pages}/', 'docs/')}"
        )


def _packages() -> Path:
    [packages] = environment_directory(DOCS_SITE).glob("lib/python*/site-packages")
    return packages


def install_drawing() -> None:
    """Install the package that draws diagrams, unless it is installed. Raises CannotBuild without npm."""
    wanted = json.loads((CONFIGURATION / "package-lock.json").read_text())["packages"]["node_modules/@mermaid-js/tiny"]
    installed = DRAWING.parents[1] / "package.json"
    if installed.is_file() and json.loads(installed.read_text())["version"] == wanted["version"]:
        return
    if shutil.which("npm") is None:
        raise CannotBuild("npm is not installed, and the diagrams of the site need a package of npm: install Node")
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    subprocess.run(["npm", "ci", *options], cwd=CONFIGURATION, check=True, stdout=subprocess.DEVNULL)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=MANUAL, help="folder of the site; default: in the API server's package"
    )
    parser.add_argument("--repository", metavar="URL", help="the public repository with the files outside docs/")
    parser.add_argument("--ref", default="main", help="its tag or branch")
    options = parser.parse_args(arguments)
    repository = Repository(options.repository.rstrip("/"), options.ref) if options.repository else None
    try:
        build(options.out, repository)
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    files = [path for path in options.out.rglob("*") if path.is_file()]
    print(f"{options.out}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
