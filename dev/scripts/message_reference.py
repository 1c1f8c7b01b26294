"""The rows of docs/reference/conditions.md: conditions, reasons, Events and alerts.

`reference.py` calls this module. This module reads Events from the operator's source code, and alerts from the chart.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from tinsmith_operator.api.conditions import ConditionType
from tinsmith_operator.api.reasons import Progress, Reason

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "charts" / "tinsmith" / "files" / "alerts.yaml"
OPERATOR = ROOT / "operator" / "tinsmith_operator"
RUNBOOKS = "../how-to/runbooks.md"
# The page says this once for all reasons.
TRIES_AGAIN = re.compile(r" The (operator|controller) tries again within five minutes\.")


def condition_rows() -> Iterator[tuple[str, ...]]:
    return ((f"`{condition}`", condition.meaning) for condition in ConditionType)


def reason_rows(progress: Progress) -> Iterator[tuple[str, ...]]:
    """Return the reason, the meaning of the reason, and what to do if a person must act.

    Other advice appears only in the messages of conditions.
    """
    for reason in Reason:
        if reason.progress is progress:
            cures = (TRIES_AGAIN.sub("", reason.cure),) if progress is Progress.STUCK else ()
            yield (f"`{reason}`", reason.meaning, *cures)


def alert_rows() -> Iterator[tuple[str, ...]]:
    for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            name, texts = rule["alert"], rule["annotations"]
            message = texts["summary"].replace("{{ ", "{").replace(" }}", "}")
            yield (
                f"[{name}]({RUNBOOKS}#{name.lower()})",
                rule["labels"]["severity"],
                rule.get("for", "at once"),
                message,
            )


def event_rows() -> Iterator[tuple[str, ...]]:
    """Return the Events without a matching condition, each with a type and a message."""
    for file in sorted(OPERATOR.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                yield from _events_in(function)


def _events_in(function: ast.FunctionDef) -> Iterator[tuple[str, ...]]:
    texts = {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for call in ast.walk(function):
        match call:
            case ast.Call(
                func=ast.Name(id="Emit"), args=[ast.Attribute(attr=kind), ast.Constant(value=str() as reason), said]
            ):
                text = texts.get(said.id, said) if isinstance(said, ast.Name) else said
                yield f"`{reason}`", kind.capitalize(), _template(text)


def _template(text: ast.expr) -> str:
    """Return the text of a string in source code.

    In an f-string, each value is replaced by the name of the value in braces.
    """
    match text:
        case ast.Constant(value=str() as constant):
            return constant
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) for part in parts)
        case ast.FormattedValue(value=value):
            return f"{{{_name_of(value)}}}"
    raise ValueError(f"an Event's message is not written out: {ast.unparse(text)}")


def _name_of(value: ast.expr) -> str:
    """Return the name of a value in words.

    For `str(a.worker_name)`, return "worker name".
    """
    match value:
        case ast.Call(args=[argument]):
            return _name_of(argument)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.replace("_", " ").lower()
    raise ValueError(f"a value of an Event's message has no name: {ast.unparse(value)}")
