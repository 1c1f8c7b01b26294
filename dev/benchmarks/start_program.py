"""A first program: one training step through the SDK. The program imports no other large package.

The program prints a line at each milestone. The rows of tokens come as JSON from standard input.
"""

from __future__ import annotations

import json
import sys
import time

import tinker
from tinker import types


def say(moment: str) -> None:
    print(f"{time.time()} {moment}", flush=True)


def datum(row: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]),
        loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},  # type: ignore[dict-item]
    )


def main(base_url: str, api_key: str, base_model: str, rank: int) -> None:
    say("SDK imported")
    data = [datum(row) for row in json.load(sys.stdin)]
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    client = service.create_lora_training_client(base_model=base_model, rank=rank).result()
    say("model created")
    outcome, step = client.forward_backward(data, "cross_entropy"), client.optim_step(types.AdamParams())
    outcome.result()
    say("forward_backward's result")
    step.result()
    say("optim_step's result")
    service.close("success").result()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
