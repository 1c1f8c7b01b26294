"""The names by which clients ask for a base model.

A client of hosted Tinker may ask for a context length: `Qwen/Qwen3-8B:peft:262144`. A model that is served as
`Qwen/Qwen3-8B` answers to this name, if its context is long enough.
"""

from __future__ import annotations

import re

from tinsmith_server.fleet.base import Fleet, ServedModel

_LONG_CONTEXT = re.compile(r"(?P<base>[^:;\s]+):peft:(?P<tokens>[1-9][0-9]{0,8})")


class NotServed(ValueError):
    """No served model has the name. The message is for the client."""


def is_model_name(name: str) -> bool:
    """Return whether a model can be served under the name.

    `:` is only in the suffix for a context length, because the SDK splits names there. `;` separates a model from a
    path in requests of the OpenAI API.
    """
    return bool(re.fullmatch(r"[^:;\s]+", name)) or context_in(name) is not None


def context_in(name: str) -> int | None:
    """Return the context length that the name asks for, in tokens, or None."""
    asked = _LONG_CONTEXT.fullmatch(name)
    return int(asked["tokens"]) if asked else None


def find_model(fleet: Fleet, name: str) -> ServedModel | None:
    """Return the model that is served under the name, or under the name without the context length."""
    if (exact := fleet.model(name)) is not None:
        return exact
    asked = _LONG_CONTEXT.fullmatch(name)
    served = fleet.model(asked["base"]) if asked else None
    if asked is None or served is None or not _is_long_enough(served, int(asked["tokens"])):
        return None
    return served


def served_model(fleet: Fleet, name: str) -> ServedModel:
    """Return the model that is served under the name. Raises NotServed with the served models."""
    served = find_model(fleet, name)
    if served is not None:
        return served
    asked = _LONG_CONTEXT.fullmatch(name)
    shorter = fleet.model(asked["base"]) if asked else None
    if shorter is not None:
        raise NotServed(
            f"{shorter.name} is served with a context of {shorter.max_context_length} tokens, and {name} asks for "
            f"more; use {shorter.name!r}, or ask an administrator for a longer context"
        )
    names = ", ".join(model.name for model in fleet.models) or "no model at all"
    raise NotServed(f"this server does not serve the base model {name!r}; it serves {names}")


def share_weights(fleet: Fleet, one: str, other: str) -> bool:
    """Return whether two names mean the same base weights. An adapter fits all names of the same base weights."""
    first, second = find_model(fleet, one), find_model(fleet, other)
    return one == other or (first is not None and second is not None and first.weights == second.weights)


def _is_long_enough(served: ServedModel, tokens: int) -> bool:
    return served.max_context_length is None or served.max_context_length >= tokens
