"""`helm test`: takes a training step through the Service, and sees that the loss falls."""

from __future__ import annotations

import array
import json
import os
import time
import urllib.error
import urllib.request

from tinsmith_rpc import wire_pb2

URL = os.environ["BASE_URL"] + "/api/v1"
HEADERS = {"X-API-Key": os.environ["API_KEY"]}
TIMEOUT_SECONDS = float(os.environ["TIMEOUT_SECONDS"])
DEADLINE = time.monotonic() + TIMEOUT_SECONDS
# Longer than the time for which the server holds a poll.
CALL_SECONDS = 60
# Every vocabulary contains these token IDs.
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


def main() -> None:
    base_model = os.environ["BASE_MODEL"] or first_model()
    session = post("/create_session", {"tags": ["helm-test"], "user_metadata": {}, "sdk_version": "helm-test"})
    session_id = session["session_id"]
    try:
        print(f"training {base_model} at {URL}", flush=True)
        before, after = losses_around_a_step(session_id, base_model)
    finally:
        post(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}})
    print(f"one step took the loss from {before:.4f} to {after:.4f}")
    if not after < before:
        raise SystemExit("the loss did not fall: the step trained nothing")


def first_model() -> str:
    served = json.loads(call("/get_server_capabilities"))["supported_models"]
    if not served:
        raise SystemExit("no base model is served: apply a TrainingSession, or give the chart an entry of `models`")
    return served[0]["model_name"]


def losses_around_a_step(session_id: str, base_model: str) -> tuple[float, float]:
    model = {"session_id": session_id, "model_seq_id": 0, "base_model": base_model, "lora_config": {"rank": 8}}
    created = post("/create_model", model)
    result_of(created)
    model_id = created["model_id"]
    before = loss_of(result_of(submit_forward_backward(model_id, seq_id=1)))
    adam = {"learning_rate": 1e-2}
    result_of(post("/optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": adam}))
    after = loss_of(result_of(submit_forward_backward(model_id, seq_id=3)))
    return before, after


def submit_forward_backward(model_id: str, seq_id: int) -> dict:
    """Submit the cross-entropy of each token, given the tokens before it."""
    request = wire_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = array.array("i", TOKENS[:-1]).tobytes()
    targets, weights = array.array("q", TOKENS[1:]), array.array("f", [1.0] * len(TOKENS[1:]))
    for name, values, dtype in (("target_tokens", targets, wire_pb2.INT64), ("weights", weights, wire_pb2.FLOAT32)):
        tensor = wire_pb2.Tensor(dense=values.tobytes(), dtype=dtype, shape=[len(values)])
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    return json.loads(call("/forward_backward", request.SerializeToString(), "application/x-protobuf"))


def loss_of(result: bytes) -> float:
    return wire_pb2.ForwardBackwardOutput.FromString(result).metrics["loss:sum"]


def result_of(future: dict) -> bytes:
    """Poll until the result arrives, and print each new reason for the wait."""
    said = None
    while time.monotonic() < DEADLINE:
        try:
            answer = call("/retrieve_future", json.dumps({"request_id": future["request_id"]}).encode())
        except urllib.error.HTTPError as error:
            if error.code != 408:
                raise
            reason = json.load(error).get("queue_state_reason")
            if reason and reason != said:
                print(f"waiting: {reason}", flush=True)
                said = reason
            continue
        if answer.startswith(b'{"error"'):
            raise SystemExit(f"the server refused: {json.loads(answer)['error']}")
        return answer
    raise SystemExit(f"no result within {TIMEOUT_SECONDS:g} s: {said or 'the server gave no reason'}")


def post(path: str, body: dict) -> dict:
    return json.loads(call(path, json.dumps(body).encode()))


def call(path: str, body: bytes | None = None, content_type: str = "application/json") -> bytes:
    headers = {**HEADERS, "Content-Type": content_type}
    request = urllib.request.Request(URL + path, body, headers)
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as response:
        return response.read()


if __name__ == "__main__":
    try:
        main()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{error.url} answered {error.code}: {error.read().decode()}") from None
    except urllib.error.URLError as error:
        raise SystemExit(f"cannot reach {URL}: {error.reason}") from None
