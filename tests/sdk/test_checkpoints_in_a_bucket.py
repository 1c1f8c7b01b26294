"""A server with checkpoints in a bucket, through the unmodified SDK: programs see no difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import fsspec
import pytest
import tinker
from support.client.sdk import adam, exact_logprobs, next_token_datum, service_client
from support.server.s3 import s3_server, used_here
from support.server.serve_process import ServedInstallation
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

MODEL = "Qwen/Qwen3-8B"
TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
DATA = [next_token_datum(TOKENS)]


@dataclass(frozen=True)
class Served:
    server: ServedInstallation
    root: str

    def objects(self, area: str) -> list[str]:
        fs, path = fsspec.core.url_to_fs(f"{self.root}/{area}", use_listings_cache=False)
        return sorted(fs.find(path))

    def alter(self, file: str) -> None:
        fs, _ = fsspec.core.url_to_fs(self.root)
        content = fs.cat_file(file)
        fs.pipe_file(file, content[:-1] + bytes([content[-1] ^ 1]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bucket")
    model = make_tiny_model(folder / "model")
    with s3_server() as s3, used_here(s3):
        root = f"{s3.bucket()}/tinsmith"
        server = ServedInstallation(folder / "data", {MODEL: model}, {"checkpoint_root": root})
        server.start()
        yield Served(server, root)
        server.stop()


@pytest.fixture
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    with service_client(served.server) as client:
        yield client


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    train(model)
    return model


def train(model: tinker.TrainingClient) -> None:
    model.forward_backward(DATA, "cross_entropy")
    model.optim_step(adam()).result()


def logprobs(model: tinker.TrainingClient) -> list[list[float]]:
    return exact_logprobs(model.forward(DATA, "cross_entropy").result())


def test_a_resumed_run_continues_bit_for_bit(client: tinker.ServiceClient, model: tinker.TrainingClient) -> None:
    path = model.save_state("middle").result().path
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    for run in (model, resumed):
        train(run)
    assert logprobs(resumed) == logprobs(model)
