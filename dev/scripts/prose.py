"""Rules of plain English that ruff does not know: how a docstring opens, and which words are no names.

tests/unit/test_prose.py holds them for every file; `make sizes` counts what breaks the first.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

# Words that open a fragment or a clause. A docstring opens with an imperative verb or a noun phrase.
OPENING = re.compile(
    r"(?:Each of|One of|Some of|Any of|"
    r"After|Also|And|Anything|As|At|Before|Behind|Beside|Both|But|By|Either|Else|Everybody|Everything|For|"
    r"From|How|If|In|It|Its|Like|Neither|Nobody|None|Nor|Not|Nothing|Of|On|Only|Or|Otherwise|Over|Since|So|"
    r"Somebody|That|There|They|This|Those|Though|To|Together|Under|Unless|Until|What|Whatever|When|"
    r"Whenever|Where|Wherever|Whether|Which|While|Who|Whoever|Whom|Whose|Why|With|Within|Without"
    r")\b"
)

# A name says what a thing is; these say only that there is one.
PRONOUN = re.compile(
    r"(?:^|_)(?:anybody|anyone|everybody|nobody|ours|somebody|someone|theirs|whatever|whoever|whom|whose)(?:_|$)",
    re.IGNORECASE,
)

# Phrases that readers had to read twice, in comments, docstrings, messages and pages.
PHRASES = re.compile(
    r"\b(?:nobody|somebody|whoever|whomever|beside|for ever|goes on|go on|going on|went on|gone on|let go|lets go|"
    r"be told|is told|are told|was told|were told)\b",
    re.IGNORECASE,
)


def broken_docstrings(docstrings: Iterable[str]) -> Iterator[str]:
    """Yield the first line of each docstring that opens with a fragment."""
    for docstring in docstrings:
        first = docstring.lstrip().partition("\n")[0]
        if OPENING.match(first):
            yield first


def pronouns_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each definition, parameter and variable that has a pronoun in it."""
    for node in ast.walk(tree):
        for name in _names_bound_by(node):
            if PRONOUN.search(name):
                yield getattr(node, "lineno", 0), name


def _names_bound_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.ClassDef(name=name):
            yield re.sub(r"(?<!^)(?=[A-Z])", "_", name)
        case ast.arg(arg=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name


def phrases_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the phrase for each phrase to avoid in the comments and strings of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}:
            yield from ((token.start[0], found[0]) for found in PHRASES.finditer(token.string))
