"""Every sampler keeps the promises in this folder. A new backend adds a line to `SAMPLERS`.

What is promised of a job holds across a network, too: `test_promises.py` asks a replica of a pool as well.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.engine.like_gpu import sampling_like_gpu
from support.engine.places import Place, model_on
from support.sampler.jobs import SMALL_SETTINGS
from support.token_server.real_vllm import SHAPE
from support.token_server.shared import SharedServer, SharedStandIns
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model

if TYPE_CHECKING:  # a machine with a GPU may lack the packages of a replica's certificates
    from support.sampler.pool_replica import PoolReplica

MODELS = {
    "qwen3": ("qwen3", SHAPE),
    "llama3": ("llama3", TinyShape(max_sequence_length=1024)),
    "qwen3-tied": ("qwen3", TinyShape(max_sequence_length=1024, tied_embeddings=True)),
    "qwen3-moe": ("qwen3-moe", TinyShape(max_sequence_length=1024)),
}
ON_A_GPU = " on a GPU"
ALSO_ON_A_GPU = ("qwen3", pytest.param("qwen3 on a GPU", marks=pytest.mark.gpu))
IN_ANOTHER_PROCESS = "pool replica"
TOKEN_SERVERS = ("vllm", "sglang")
"""The token servers that have stand-ins."""
VLLM_ITSELF = "vllm itself"
EVERY_TOKEN_SERVER = (*TOKEN_SERVERS, pytest.param(VLLM_ITSELF, marks=pytest.mark.vllm))
SAMPLERS: dict[str, Callable[[TorchModel], Sampler]] = {
    "builtin": lambda model: BuiltinSampler(model, BuiltinSamplerSettings(deterministic=True, **SMALL_SETTINGS)),
    "builtin-fast": lambda model: BuiltinSampler(model, BuiltinSamplerSettings(deterministic=False, **SMALL_SETTINGS)),
}
PLACES: dict[str, tuple[Place, torch.dtype]] = {
    "builtin-like-gpu": ("like-gpu", torch.float32),
    "builtin-gpu": ("gpu", torch.float32),
    "builtin-like-gpu-bfloat16": ("like-gpu", torch.bfloat16),
    "builtin-gpu-bfloat16": ("gpu", torch.bfloat16),
}
"""The fast sampler on a GPU, and on the CPU by a GPU's path."""
IN_PLACE_OF_A_GPU = ("builtin-like-gpu", pytest.param("builtin-gpu", marks=pytest.mark.gpu))
IN_BFLOAT16 = ("builtin-like-gpu-bfloat16", pytest.param("builtin-gpu-bfloat16", marks=pytest.mark.gpu))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TorchModel]:
    """Return a loader of tiny models by their names in `MODELS`; on a GPU where `ON_A_GPU` follows the name."""
    loaded: dict[str, TorchModel] = {}

    def load(name: str) -> TorchModel:
        if name.endswith(ON_A_GPU):
            return model_on("gpu", load(name.removesuffix(ON_A_GPU)).directory)
        if name not in loaded:
            family, shape = MODELS[name]
            directory: Path = make_tiny_model(tmp_path_factory.mktemp(name), family=family, shape=shape)
            loaded[name] = load_torch_model(str(directory))
        return loaded[name]

    return load


@pytest.fixture(scope="session", params=["qwen3"])
def model(request: pytest.FixtureRequest, model_of: Callable[[str], TorchModel]) -> TorchModel:
    """Return the model of the sampler; parametrize indirectly for others."""
    return model_of(request.param)


@pytest.fixture(params=list(SAMPLERS))
def sampler(request: pytest.FixtureRequest, model: TorchModel) -> Iterator[Sampler]:
    """Return a sampler of the kind that the parameter names, which may be any of this module's."""
    with path_of(PLACES.get(request.param, ("cpu", None))[0]):
        sampler = _new_sampler(request, model)
        yield sampler
        sampler.close()


def path_of(place: Place) -> AbstractContextManager[None]:
    """Return the context in which samplers of that place run."""
    return sampling_like_gpu() if place == "like-gpu" else nullcontext()


def _new_sampler(request: pytest.FixtureRequest, model: TorchModel) -> Sampler:
    if request.param in PLACES:
        place, dtype = PLACES[request.param]
        adapters = "bfloat16" if dtype == torch.bfloat16 else "float32"
        settings = BuiltinSamplerSettings(adapter_dtype=adapters, **SMALL_SETTINGS)
        return BuiltinSampler(model_on(place, model.directory, dtype), settings)
    if request.param == IN_ANOTHER_PROCESS:
        from support.sampler.pool_replica import RemoteSampler

        replica: PoolReplica = request.getfixturevalue("replica")
        return RemoteSampler(replica, f"file://{replica.folder / 'checkpoints'}", model.info)
    if request.param in TOKEN_SERVERS or request.param == VLLM_ITSELF:
        return shared_server(request, request.param).sampler()
    return SAMPLERS[request.param](model)


@pytest.fixture(scope="session")
def replica(tmp_path_factory: pytest.TempPathFactory, model_of: Callable[[str], TorchModel]) -> Iterator[PoolReplica]:
    """Return a replica of a pool of `qwen3`, behind mutual TLS.

    It is shared, so its counters and caches say nothing about one test.
    """
    from support.sampler.pool_replica import PoolReplica

    replica = PoolReplica(
        tmp_path_factory.mktemp("replica"),
        {"--engine": "support.sampler.pool_replica:build_small_sampler"},
        model=model_of("qwen3").directory,
    )
    replica.start()
    try:
        replica.until_ready()
        yield replica
        replica.signal(signal.SIGTERM)
        status, errors = asyncio.run(replica.ended())
        assert status == 0, errors
    finally:
        asyncio.run(replica.discard())


def shared_server(request: pytest.FixtureRequest, engine: str) -> SharedServer:
    """Return one of `EVERY_TOKEN_SERVER`, with `qwen3`."""
    if engine == VLLM_ITSELF:
        itself: SharedServer = request.getfixturevalue("real_vllm")
        return itself
    stand_ins: SharedStandIns = request.getfixturevalue("token_servers")
    return stand_ins.server(engine)


@pytest.fixture(scope="session")
def token_servers(
    tmp_path_factory: pytest.TempPathFactory, model_of: Callable[[str], TorchModel]
) -> Iterator[SharedStandIns]:
    """Stand-ins with `qwen3` for the servers of other makers; shared, and each test's sampler is its own."""
    stand_ins = SharedStandIns(tmp_path_factory.mktemp("token-servers"), model_of("qwen3").directory)
    yield stand_ins
    stand_ins.close()
