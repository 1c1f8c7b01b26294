"""Rules of plain English that ruff does not check: the first word of a docstring, and pronouns in identifiers.

tests/unit/test_prose.py checks every file. `make sizes` counts the docstrings that break the first rule.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

# Words that begin a fragment. A docstring begins with an imperative verb or a noun phrase.
OPENING = re.compile(
    r"(?:Each of|One of|Some of|Any of|"
    r"Also|And|Anything|As|Behind|Beside|Both|But|By (?!default)|Either|Else|Everybody|Everything|From|How|Like|Nobody|"
    r"Nor|Not|Nothing|Of|Or|Since|So|Somebody|That|This|Those|Though|To|Together|Under|Unless|What|Whatever|Whenever|"
    r"Where|Wherever|Whether|Which|Who|Whoever|Whom|Whose|Why|Within"
    r")\b"
)
# Words that begin a sentence without its own subject. A test's docstring may use them, because it explains the name.
CONTEXT = re.compile(
    r"(?:After|At|Before|For|If|In|It|Its|Neither|None|On|Otherwise|Over|There|They|Until|When|While|With|Without)\b"
)

# A name says what a thing is. These pronouns say only that a thing exists.
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


def fragments_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the first sentence of each docstring that opens with a fragment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            is_test = getattr(node, "name", "").startswith("test_")
            if docstring and (OPENING.match(docstring) or (CONTEXT.match(docstring) and not is_test)):
                yield node.body[0].lineno, docstring.partition("\n")[0]


def pronouns_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each definition, parameter and variable with a pronoun in the name."""
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
    """Yield the line and the text of each forbidden phrase in comments and strings of a Python file.

    A string of one word is exempt, because such a string is a name, for example a key in a file.
    """
    if not PHRASES.search(text):  # reading the tokens of every file takes seconds
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = token.type in {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
        if is_text and not token.string.strip("\"'").isidentifier():
            yield from ((token.start[0], found[0]) for found in PHRASES.finditer(token.string))
