"""Graphs of custom losses, as an SDK sends them: traced from functions, or written down by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from tinsmith_rpc.custom_losses import loss_id_of

Ref = dict[str, str]


def ref(name: str) -> Ref:
    return {"ref": name}


def node(name: str, target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def written(
    *calls: Mapping[str, Any], inputs: Sequence[str] = (), loss: str = "loss", metrics: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a loss of `logprobs` and of other inputs of rank 1. `loss` and `metrics` name nodes."""
    names = ["logprobs", *inputs]
    found = {key: ref(name) for key, name in (metrics or {}).items()}
    return {
        "name": "written",
        "inputs": [{"name": name, "rank": 1} for name in names],
        "graph": {
            "format": 1,
            "nodes": [
                *(node(name, name, op="placeholder") for name in names),
                *calls,
                node("output", "output", {"tuple": [ref(loss), {"dict": found}]}, op="output"),
            ],
        },
    }


def traced(fn: Callable[..., Any], **ranks: int) -> dict[str, Any]:
    """Return what the SDK sends for a function."""
    handle = trace_loss(fn, ranks, "session")  # type: ignore[arg-type]
    return {
        "name": handle.name,
        "inputs": [declared.model_dump() for declared in handle.inputs],
        "graph": encode_graph(handle).model_dump(),
    }


def traced_id(fn: Callable[..., Any], **ranks: int) -> str:
    return loss_id_of(traced(fn, **ranks))
