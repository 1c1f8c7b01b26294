"""The rates of an SDK program on a server: trained tokens per second of several adapters, and samples per second.

The program runs in the Python environment of each side, which contains the SDK, so the program imports no other
package. The program prints JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from typing import Any

import tinker
from tinker import types

ROWS, TOKENS, RANK = 8, 128, 8
STEPS, WARM_STEPS = 10, 3
SAMPLES, SAMPLED_TOKENS, PROMPT_TOKENS = 8, 32, 30
IDS_OF_ALL_TOKENIZERS = 50_000


def datum(salt: int) -> types.Datum:
    ids = [(1000 + salt * 7919 + place * 104729) % IDS_OF_ALL_TOKENIZERS for place in range(TOKENS + 1)]
    inputs = {
        "target_tokens": types.TensorData(data=ids[1:], dtype="int64", shape=[TOKENS]),
        "weights": types.TensorData(data=[1.0] * TOKENS, dtype="float32", shape=[TOKENS]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def train(client: tinker.TrainingClient, number: int, seconds: list[float]) -> None:
    data = [datum(number * 100 + row) for row in range(ROWS)]
    for step in range(WARM_STEPS + STEPS):
        started = time.perf_counter()
        gradient = client.forward_backward(data, "cross_entropy")
        applied = client.optim_step(types.AdamParams(learning_rate=1e-3))
        gradient.result()
        applied.result()
        if step >= WARM_STEPS:
            seconds.append(time.perf_counter() - started)


def there(client: Any) -> Any:
    """Return the client. Newer SDKs return a future of the client."""
    return client.result() if hasattr(client, "result") else client


def sampled_per_second(client: tinker.TrainingClient) -> float:
    sampler = there(client.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(list(range(PROMPT_TOKENS)))
    rates = []
    for seed in range(3):
        params = types.SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, seed=seed)
        started = time.perf_counter()
        answer = sampler.sample(prompt=prompt, num_samples=SAMPLES, sampling_params=params).result()
        rates.append(sum(len(one.tokens) for one in answer.sequences) / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def main() -> None:
    url, model, adapters = sys.argv[1], sys.argv[2], int(sys.argv[3])
    service = tinker.ServiceClient(base_url=url)
    clients = [there(service.create_lora_training_client(base_model=model, rank=RANK)) for _ in range(adapters)]
    seconds: list[float] = []
    threads = [threading.Thread(target=train, args=(client, number, seconds)) for number, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trained = adapters * ROWS * TOKENS / statistics.median(seconds)
    print(json.dumps({"trained_per_second": trained, "sampled_per_second": sampled_per_second(clients[0])}))


if __name__ == "__main__":
    main()
