"""Print figures about the project: the numbers of files, lines, words, and docstrings that begin with a fragment.

`make sizes` prints the figures of the work tree. With `--at COMMIT`, the program prints the figures of a commit, so
that two states can be compared. With `--check`, the program prints only the pages that exceed the limits of docs/, and
exits with 1 if such pages exist.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from prose import fragments_in

ROOT = Path(__file__).parents[2]
PRODUCT = ("operator/", "api_server/", "trainer_image/", "client/", "rpc/")
GENERATED = "_pb2"
WORD = re.compile(r"\S*\w\S*")
"""A token that contains a letter or a digit. So the bars and lines of a table are not words; its cells are."""

MOST_WORDS = 45_000
MOST_LINES = 200
MOST_LINES_OF = {"docs/design.md": 300}


def sources_of(commit: str | None) -> Mapping[str, str]:
    """Return the text of each tracked file, by path. `commit` None means the work tree."""
    if commit is None:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return {
            name: (ROOT / name).read_text(errors="replace") for name in names.split("\0") if (ROOT / name).is_file()
        }
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        return {
            member.name: content.read().decode(errors="replace")
            for member in files
            if member.isfile() and (content := files.extractfile(member)) is not None
        }


def measure(sources: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the name and the value of each figure."""
    python = {name: text for name, text in sources.items() if name.endswith(".py") and GENERATED not in name}
    product = {name: text for name, text in python.items() if name.startswith(PRODUCT)}
    tests = {name: text for name, text in python.items() if name.startswith("tests/")}
    pages = pages_of(sources)
    golden = {name: text for name, text in sources.items() if "/golden/" in name}
    yield "product files", len(product)
    yield "product lines", _lines(product)
    yield "test files", len(tests)
    yield "test lines", _lines(tests)
    yield "lines of golden files", _lines(golden)
    yield "words in docs", _words(pages)
    yield "words in docs/design.md", _words({name: text for name, text in pages.items() if name == "docs/design.md"})
    yield "pages over 200 lines", sum(text.count("\n") > MOST_LINES for text in pages.values())
    trees = [ast.parse(text) for text in python.values()]
    yield "docstrings", sum(_docstrings(tree) for tree in trees)
    yield "docstrings that open with a fragment", sum(len(list(fragments_in(tree))) for tree in trees)


def pages_of(sources: Mapping[str, str]) -> Mapping[str, str]:
    return {name: text for name, text in sources.items() if name.startswith("docs/") and name.endswith(".md")}


def excesses(pages: Mapping[str, str]) -> Iterator[str]:
    """Yield one sentence for each limit that docs/ or a page of docs/ exceeds."""
    words = _words(pages)
    if words > MOST_WORDS:
        yield f"docs/ has {words:,} words, and {MOST_WORDS:,} are permitted: shorten a page."
    for name, text in pages.items():
        lines, most = text.count("\n"), MOST_LINES_OF.get(name, MOST_LINES)
        if lines > most:
            yield f"{name} has {lines} lines, and {most} are permitted: split it by subject, or shorten it."


def _words(pages: Mapping[str, str]) -> int:
    return sum(len(WORD.findall(text)) for text in pages.values())


def _docstrings(tree: ast.AST) -> int:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return sum(isinstance(node, documented) and ast.get_docstring(node) is not None for node in ast.walk(tree))


def _lines(files: Mapping[str, str]) -> int:
    return sum(text.count("\n") for text in files.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--at", metavar="COMMIT", help="measure this commit instead of the work tree")
    parser.add_argument("--check", action="store_true", help="check the limits of docs/")
    options = parser.parse_args()
    sources = sources_of(options.at)
    if options.check:
        problems = list(excesses(pages_of(sources)))
        print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
        return 1 if problems else 0
    for what, figure in measure(sources):
        print(f"{what:40}{figure:>9,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
