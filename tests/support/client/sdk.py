"""The unmodified SDK, pointed at a server under test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import tinker
from support.server.serve_process import API_KEY
from tinker import types

QUESTION = (5, 9, 2, 14, 7)
ANSWER = (11, 3, 8)


class Served(Protocol):
    """A server, or a proxy before several servers."""

    @property
    def url(self) -> str: ...


@contextmanager
def service_client(server: Served, **options: Any) -> Iterator[tinker.ServiceClient]:
    """Yield a session of its own, which ends with the block."""
    client = tinker.ServiceClient(**({"base_url": server.url, "api_key": API_KEY} | options))
    try:
        yield client
    finally:
        client.close("success").result()


def next_token_datum(tokens: Sequence[int], weight: float = 1.0) -> types.Datum:
    """Make a datum for the cross-entropy of each token given the previous ones."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": list(tokens[1:]), "weights": [weight] * (len(tokens) - 1)},  # type: ignore[dict-item]
    )


def adam(learning_rate: float = 1e-2, **options: float) -> types.AdamParams:
    return types.AdamParams(learning_rate=learning_rate, **options)


def exact_logprobs(result: types.ForwardBackwardOutput) -> list[list[float]]:
    """Return every logprob of a result. Equal lists are equal bits, which the repr of the SDK's tensors hides."""
    return [[float(value) for value in output["logprobs"].data] for output in result.loss_fn_outputs]
