"""A whole life of a program, in whichever SDK its Python has: what each step came to, as JSON on its last line.

It runs in an environment that has that SDK and PyTorch, and nothing of ours: `generation_program.py URL KEY MODEL`.
What an SDK does not have yet, or has no more, is left out, and the answer says so. The first step that fails is the
last.
"""

from __future__ import annotations

import json
import sys
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import tinker
import torch
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

TOKENS = ([5, 9, 2, 14, 7, 11, 3, 8], [4, 4, 8, 15, 16, 23])
PROMPT = [5, 9, 2, 14, 7]
MANY = 1030
POOL = ClientConnectionPoolType.TRAIN
NOT_HERE = "not in this SDK"
RESULT_SECONDS = 120


def settled(value: Any) -> Any:
    """Return the result of a call, or of the future that newer SDKs return from it."""
    return value.result(RESULT_SECONDS) if hasattr(value, "result") else value


def datum(tokens: list[int]) -> Any:
    inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def data() -> list[Any]:
    return [datum(tokens) for tokens in TOKENS]


def logprobs_of(result: Any) -> list[list[float]]:
    """Return the logprobs. Equal lists have equal bits."""
    return [[float(value) for value in output["logprobs"].data] for output in result.loss_fn_outputs]


def of_checkpoints(listed: Any) -> list[str]:
    return sorted(f"{one.checkpoint_type}: {one.checkpoint_id}" for one in listed.checkpoints)


def squared(_data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = torch.stack([(one**2).sum() for one in logprobs]).sum()
    return loss, {"squared": loss.item()}


class Life:
    """The steps of a program, one method each, in the order in which they run."""

    def __init__(self, url: str, key: str, base_model: str) -> None:
        self.base_model = base_model
        self.service = tinker.ServiceClient(base_url=url, api_key=key)
        self.rest = self.service.create_rest_client()
        self.model: Any = None
        self.sampler: Any = None
        self.saved = ""
        self.saved_for_sampler = ""

    def capabilities(self) -> bool:
        served = self.service.get_server_capabilities().supported_models
        return self.base_model in [getattr(one, "model_name", one) for one in served]

    def create(self) -> str:
        self.model = settled(self.service.create_lora_training_client(self.base_model, rank=8, seed=1))
        return str(self.model.get_info().model_data.model_name)

    def train(self) -> list[list[list[float]]]:
        """Make two steps, submitted together."""
        steps = []
        for _ in range(2):
            trained = self.model.forward_backward(data(), "cross_entropy")
            steps.append((trained, self.model.optim_step(types.AdamParams(learning_rate=1e-2))))
        for _, stepped in steps:
            settled(stepped)
        return [logprobs_of(settled(trained)) for trained, _ in steps]

    def forward(self) -> list[list[float]]:
        return logprobs_of(settled(self.model.forward(data(), "cross_entropy")))

    def custom_loss(self) -> list[list[float]]:
        settled(self.model.forward_backward_custom(data(), squared))
        settled(self.model.optim_step(types.AdamParams(learning_rate=1e-3)))
        return self.forward()

    def save_state(self) -> bool:
        self.saved = settled(self.model.save_state("state")).path
        return self.saved.endswith("/weights/state")

    def load_state(self) -> bool:
        before = self.forward()
        settled(self.model.forward_backward(data(), "cross_entropy"))
        settled(self.model.optim_step(types.AdamParams(learning_rate=1e-2)))
        changed = self.forward() != before
        settled(self.model.load_state(self.saved))
        return changed and self.forward() == before

    def resume(self) -> list[list[float]]:
        again = getattr(
            self.service,
            "create_training_client_from_state_with_optimizer",
            self.service.create_training_client_from_state,
        )
        resumed = settled(again(self.saved))
        settled(resumed.forward_backward(data(), "cross_entropy"))
        settled(resumed.optim_step(types.AdamParams(learning_rate=1e-2)))
        return logprobs_of(settled(resumed.forward(data(), "cross_entropy")))

    def save_for_sampler(self) -> bool:
        self.saved_for_sampler = settled(self.model.save_weights_for_sampler("samples")).path
        return self.saved_for_sampler.endswith("/sampler_weights/samples")

    def sample(self) -> list[tuple[list[int], list[float], str]]:
        self.sampler = settled(self.service.create_sampling_client(model_path=self.saved_for_sampler))
        parameters = types.SamplingParams(max_tokens=5, seed=3, temperature=0.7)
        drawn = settled(self.sampler.sample(types.ModelInput.from_ints(PROMPT), 2, parameters))
        return [(list(one.tokens), [*one.logprobs], str(one.stop_reason)) for one in drawn.sequences]

    def sample_unnamed(self) -> int:
        unnamed = settled(self.model.save_weights_and_get_sampling_client("unnamed"))
        # Without a seed one draw in 512, the size of the vocabulary, is the end of the sequence at once.
        parameters = types.SamplingParams(max_tokens=2, seed=3)
        drawn = settled(unnamed.sample(types.ModelInput.from_ints(PROMPT), 1, parameters))
        return len(drawn.sequences[0].tokens)

    def prompt_logprobs(self) -> list[float | None]:
        return [*settled(self.sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)))]

    def top_prompt_logprobs(self) -> list[int]:
        drawn = settled(
            self.sampler.sample(
                types.ModelInput.from_ints(PROMPT),
                1,
                types.SamplingParams(max_tokens=1),
                include_prompt_logprobs=True,
                topk_prompt_logprobs=3,
            )
        )
        return [len(row or ()) for row in drawn.topk_prompt_logprobs]

    def many_chunks(self) -> bool:
        """Send more datums than any SDK sends at once: outputs keep their order, and a step follows all of them."""
        tokens = [[5, 9], *[[4, 4]] * MANY, [9, 5]]
        result = settled(self.model.forward_backward([datum(pair) for pair in tokens], "cross_entropy"))
        settled(self.model.optim_step(types.AdamParams(learning_rate=1e-3)))
        first, *between, last = logprobs_of(result)
        return len(between) == MANY and all(one == between[0] for one in between) and len({*first, *last}) == 2

    def runs(self) -> bool:
        listed = settled(self.rest.list_training_runs(limit=1000)).training_runs
        one = settled(self.rest.get_training_run(self.model.model_id))
        return one.training_run_id in [run.training_run_id for run in listed] and one.lora_rank == 8

    def checkpoints(self) -> list[str]:
        return of_checkpoints(settled(self.rest.list_checkpoints(self.model.model_id)))

    def all_checkpoints(self) -> bool | str:
        if not hasattr(self.rest, "list_user_checkpoints"):
            return NOT_HERE
        return "training: weights/state" in of_checkpoints(settled(self.rest.list_user_checkpoints(limit=1000)))

    def sessions(self) -> bool | str:
        if not hasattr(self.rest, "list_sessions"):
            return NOT_HERE
        session_id = self.model.model_id.split(":")[0]
        listed = settled(self.rest.list_sessions(limit=1000)).sessions
        return (
            session_id in listed and self.model.model_id in settled(self.rest.get_session(session_id)).training_run_ids
        )

    def weights_info(self) -> int | str:
        if not hasattr(self.rest, "get_weights_info_by_tinker_path"):
            return NOT_HERE
        return int(settled(self.rest.get_weights_info_by_tinker_path(self.saved)).lora_rank)

    def archive(self) -> bool | str:
        """Download the weights of a sampler as one file."""
        if not hasattr(self.rest, "get_checkpoint_archive_url_from_tinker_path"):
            return NOT_HERE
        link = settled(self.rest.get_checkpoint_archive_url_from_tinker_path(self.saved_for_sampler))
        with urllib.request.urlopen(link.url, timeout=30) as answer:
            return bool(answer.read(2) == b"\x1f\x8b")

    def delete(self) -> list[str]:
        settled(self.rest.delete_checkpoint_from_tinker_path(self.saved))
        return of_checkpoints(settled(self.rest.list_checkpoints(self.model.model_id)))

    def unload(self) -> bool | str:
        """Unload the model through the HTTP layer; no public client has a call for it."""
        if not hasattr(types, "UnloadModelRequest"):
            return NOT_HERE
        model_id = self.model.model_id

        async def unload() -> Any:
            with self.service.holder.aclient(POOL) as client:
                if not hasattr(client.models, "unload"):
                    return None
                return await client.models.unload(request=types.UnloadModelRequest(model_id=model_id))

        return NOT_HERE if settled(self.service.holder.run_coroutine_threadsafe(unload())) is None else True


STEPS = [name for name, value in vars(Life).items() if callable(value) and not name.startswith("_")]


def main(url: str, key: str, base_model: str) -> int:
    came_to: dict[str, Any] = {}
    failed: dict[str, str] = {}
    life = Life(url, key, base_model)
    for name in STEPS:
        step: Callable[[], Any] = getattr(life, name)
        try:
            came_to[name] = step()
        except Exception as error:
            traceback.print_exc()
            failed = {"step": name, "error": f"{type(error).__name__}: {error}"}
            break
    print(json.dumps({"sdk": version("tinker"), "came_to": came_to, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
