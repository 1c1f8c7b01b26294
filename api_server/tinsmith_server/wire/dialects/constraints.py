"""The constraints that clients ask for: structured outputs and forced tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from tinsmith_rpc import worker_pb2

MOST_BIASED_TOKENS = 1024
MOST_BIAS = 100


def of_response_format(value: Mapping[str, Any] | None) -> worker_pb2.Constraint | None:
    """Return the constraint of OpenAI's `response_format`, or None for any text. Raises ValueError."""
    kind = "text" if value is None else value.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return worker_pb2.Constraint(json_object=worker_pb2.JsonObject())
        case "json_schema":
            described = (value or {}).get("json_schema")
            if not isinstance(described, dict):
                raise ValueError("response_format.json_schema must be an object with a schema")
            return _of_schema("response_format.json_schema.schema", described.get("schema"))
        case _:
            raise ValueError("response_format.type must be text, json_object or json_schema")


def of_structured_outputs(value: Mapping[str, Any] | None) -> worker_pb2.Constraint | None:
    """Return the constraint of vLLM's `structured_outputs`, or None. Raises ValueError."""
    given = {name: kind for name, kind in (value or {}).items() if kind not in (None, False)}
    if value is None:
        return None
    match [*given.items()]:
        case [("json", schema)]:
            return _of_schema("structured_outputs.json", _parsed(schema))
        case [("json_object", True)]:
            return worker_pb2.Constraint(json_object=worker_pb2.JsonObject())
        case [("regex", str(regex))]:
            return worker_pb2.Constraint(regex=regex)
        case _:
            raise ValueError("structured_outputs must have either json, json_object or regex, and nothing else")


def of_output_format(value: Any) -> worker_pb2.Constraint | None:
    """Return the constraint of Anthropic's `output_config.format`, or None. Raises ValueError."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise ValueError("output_config.format must be an object of type json_schema, with a schema")
    return _of_schema("output_config.format.schema", value.get("schema"))


def forced_calls(tools: Sequence[str | None], name: str | None, *, single: bool) -> worker_pb2.Constraint:
    """Return the constraint for calls of `tools`, or of the tool with this name. Raises ValueError."""
    if not tools:
        raise ValueError("tool_choice forces a call, and the request has no tools; add tools")
    if name is not None and name not in tools:
        raise ValueError(f"tool_choice names {name[:100]!r}, which is not one of tools")
    return worker_pb2.Constraint(tool_calls=worker_pb2.ToolCalls(name=name or "", single=single))


def logit_bias(value: Mapping[str, Any] | None) -> dict[int, float]:
    """Return the bias of each token. Raises ValueError."""
    if len(value or {}) > MOST_BIASED_TOKENS:
        raise ValueError(f"logit_bias may name at most {MOST_BIASED_TOKENS} tokens")
    return dict(_bias(token, bias) for token, bias in (value or {}).items())


def _bias(token: str, bias: Any) -> tuple[int, float]:
    is_token = token.isascii() and token.isdigit() and int(token) < 2**31
    if not is_token or not isinstance(bias, int | float) or not abs(bias) <= MOST_BIAS:
        raise ValueError(f"logit_bias: each entry is a token id with a number from -{MOST_BIAS} to {MOST_BIAS}")
    return int(token), float(bias)


def _of_schema(where: str, schema: Any) -> worker_pb2.Constraint:
    if not isinstance(schema, dict):
        raise ValueError(f"{where} must be a JSON schema, which is an object")
    return worker_pb2.Constraint(json_schema=orjson.dumps(schema).decode())


def _parsed(schema: Any) -> Any:
    try:
        return orjson.loads(schema) if isinstance(schema, str) else schema
    except orjson.JSONDecodeError as error:
        raise ValueError(f"structured_outputs.json is no JSON: {error}") from error
