"""The training library uses the SDK as its newest version asks: without deprecated and without blocking calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tinsmith

SOURCES = Path(tinsmith.__file__).parent
BLOCKING = {"create_lora_training_client", "create_sampling_client", "create_training_client_from_state", "save_state"}
"""Calls of the SDK that return a future. In a coroutine, the SDK refuses `.result()` of these futures."""


def coroutines() -> Iterator[tuple[Path, ast.AsyncFunctionDef]]:
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AsyncFunctionDef):
                yield file, node


def test_no_deprecated_method_of_the_sdk_is_called() -> None:
    """SDK 0.39 deprecates the methods with `_async` in their names: await the plain ones."""
    calls = [
        f"{file.name}:{node.lineno}"
        for file in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_async")
    ]
    assert calls == []


def test_no_coroutine_waits_for_a_future_of_the_sdk() -> None:
    waits = [
        f"{file.name}:{node.lineno}"
        for file, coroutine in coroutines()
        for node in ast.walk(coroutine)
        if isinstance(node, ast.Attribute) and node.attr == "result" and _is_a_call_of(node.value)
    ]
    assert waits == []


def _is_a_call_of(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BLOCKING
