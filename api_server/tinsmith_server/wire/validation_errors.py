"""What is wrong with a body, in words to its sender."""

from __future__ import annotations

from pydantic import ValidationError

ERRORS_SHOWN = 3


def sentence(error: ValidationError) -> str:
    """What is wrong with a body, for its sender."""
    found = error.errors(include_url=False, include_context=False)
    shown = [_problem(item["loc"], item["msg"], item["type"], item["input"]) for item in found[:ERRORS_SHOWN]]
    more = len(found) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)


def _problem(location: tuple[int | str, ...], message: str, kind: str, value: object) -> str:
    where = _cut(".".join(str(part) for part in location))
    text = _cut(message.removeprefix("Value error, ").rstrip("."))
    if kind == "value_error":
        return text
    if value is None and kind != "missing":
        return f"{where}: {text}; it arrived as null, which is also how the SDK sends NaN and infinity"
    shown = repr(value) if isinstance(value, str | int | float) else ""
    return f"{where}: {text}, not {shown}" if shown and kind != "missing" and len(shown) <= 80 else f"{where}: {text}"


def _cut(text: str) -> str:
    """Names and messages may hold what the sender wrote."""
    return text if len(text) <= 300 else f"{text[:300]}…"
