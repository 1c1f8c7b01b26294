"""The worker's volume is gone: its models say so, their checkpoints stand, new models work."""

from __future__ import annotations

import shutil

import pytest
import tinker
from support.client.sdk import adam, exact_logprobs, next_token_datum, service_client
from support.server.serve_process import REFERENCE_MODEL, ServedInstallation

DATA = [next_token_datum([5, 9, 2, 14, 7])]


def test_a_lost_volume_corrupts_its_models_and_leaves_their_checkpoints(reference_server: ServedInstallation) -> None:
    server = reference_server
    with service_client(server) as client:
        model = client.create_lora_training_client(REFERENCE_MODEL, rank=4, seed=1).result()
        model.forward_backward(DATA, "cross_entropy")
        model.optim_step(adam())
        path = model.save_state("before").result().path
        expected = exact_logprobs(model.forward(DATA, "cross_entropy").result())
        server.stop()
        shutil.rmtree(server.data / "workers")
        server.start()
        with pytest.raises(tinker.RequestFailedError, match=r"lost|corrupted") as failure:
            model.forward(DATA, "cross_entropy").result()
        assert failure.value.category == "server"
        resumed = client.create_training_client_from_state(path).result()
        assert exact_logprobs(resumed.forward(DATA, "cross_entropy").result()) == expected
        saved = resumed.save_state("after").result().path
        again = client.create_training_client_from_state(saved).result()
        assert exact_logprobs(again.forward(DATA, "cross_entropy").result()) == expected
        run = server.get(f"/api/v1/training_runs/{path.split('/')[2]}").json()
        assert run["corrupted"]
