"""Train and sample a LoRA adapter over plain HTTP: no SDK, no session, no sequence numbers, only JSON.

    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-… python plain_http.py --model demo/tiny

A long call returns a request_id at once. The result is at /retrieve_future/{request_id}; the status 408 means "not yet,
ask again". With an Idempotency-Key, a call can safely be repeated after a lost answer.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import httpx

TOKENS = [11, 12, 13, 14, 15, 16, 17, 18]
"""The tokens that the adapter learns. Your own program makes tokens with the tokenizer that /get_tokenizer names."""
LORA = {"rank": 16, "seed": 1}
STEPS = 64


def main() -> None:
    arguments = parse_arguments()
    headers = {"X-API-Key": os.environ.get("TINKER_API_KEY", "")}
    base_url = f"{os.environ['TINKER_BASE_URL'].rstrip('/')}/api/v1"
    with httpx.Client(base_url=base_url, headers=headers, timeout=60) as server:
        model_id = done(server, "/create_model", base_model=arguments.model, lora_config=LORA)["model_id"]
        losses = [train(server, model_id, step) for step in range(STEPS)]
        print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {STEPS} steps")
        saved = done(server, "/save_weights_for_sampler", model_id=model_id, path="learnt")
        params = {"max_tokens": len(TOKENS) - 1, "temperature": 0}
        drawn = done(server, "/sample", model_path=saved["path"], prompt=TOKENS[:1], sampling_params=params)
        print(f"sample: {drawn['sequences'][0]['tokens']}")
        answer(server.post("/delete_model", json={"model_id": model_id}))


def train(server: httpx.Client, model_id: str, step: int) -> float:
    """Make one step, and return the loss before this step.

    The server adds up the gradients of all forward_backward calls before an optimizer step.
    """
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": TOKENS[1:], "dtype": "int64"},
            "weights": {"data": [1.0] * len(TOKENS[1:]), "dtype": "float32"},
        },
    }
    batch = {"data": [datum], "loss_fn": "cross_entropy"}
    trained = done(server, "/forward_backward", key=f"{step}", model_id=model_id, forward_backward_input=batch)
    done(server, "/optim_step", key=f"{step}", model_id=model_id, adam_params={"learning_rate": 0.004})
    return float(trained["metrics"]["loss:sum"])


def done(server: httpx.Client, call: str, key: str | None = None, **body: Any) -> dict[str, Any]:
    """Return the result of a call that returned a request_id."""
    sent = {} if key is None else {"Idempotency-Key": key}
    accepted = answer(server.post(call, json=body, headers=sent))
    while (polled := server.get(f"/retrieve_future/{accepted['request_id']}")).status_code == 408:
        pass  # the server holds the request until it times out
    result = answer(polled)
    if "error" in result:
        raise SystemExit(f"{call} failed: {result['error']}")
    return result


def answer(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON answer. If the server refuses the request, the body is one sentence, which becomes the error."""
    if response.is_error:
        raise SystemExit(f"{response.request.url.path}: {response.json()['detail']}")
    content: dict[str, Any] = response.json()
    return content


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train and sample by plain HTTP.")
    parser.add_argument("--model", required=True, help="the name of a base model that the server serves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
