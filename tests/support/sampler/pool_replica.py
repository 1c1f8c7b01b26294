"""A replica of a pool, as a process behind mutual TLS, and a sampler that is one from afar."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray
from support.certificates import CLIENT, SERVER, Leaf
from support.sampler.jobs import SMALL_SETTINGS
from support.tiny_models import tiny_directory
from support.worker.pod_process import PodProcess
from support.worker.process import RECONNECTS, START_SECONDS
from tinsmith_rpc import TENANT_METADATA, wire_pb2, worker_pb2, worker_pb2_grpc
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import ServerError, TrainerError, UserError
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.sampling.base import (
    AltTokens,
    SampleJob,
    SampleOutcome,
    Sampler,
    SamplerStats,
    Sequence,
    TopkLogprobs,
)
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.wire.tensors import decode_tensor, encode_dense
from tinsmith_trainer.worker.engine_factories import load_base_model
from tinsmith_trainer.worker.peers import SAMPLER
from typing_extensions import override

_numbers = itertools.count()


def build_small_sampler(options: WorkerOptions) -> tuple[BaseModelInfo, Sampler]:
    """Build the sampler for a replica's `--engine support.sampler.pool_replica:build_small_sampler`."""
    model = load_base_model(options)
    settings = BuiltinSamplerSettings(deterministic=options.deterministic_sampling, **SMALL_SETTINGS)
    return model.info, BuiltinSampler(model, settings)


@dataclass
class PoolReplica(PodProcess):
    """One life of a replica, which has no volume; its checkpoint root is in the folder."""

    model: Path = field(default_factory=tiny_directory)

    @override
    def own_leaf(self) -> Leaf:
        return self.authority.leaf(self.name, SAMPLER, usages=(SERVER, CLIENT))

    @override
    def own_flags(self) -> dict[str, str | None]:
        return super().own_flags() | {"--role": "sampler", "--model": str(self.model)}

    def until_ready(self) -> None:
        """Wait for the replica, in tests that have no event loop."""
        with grpc.insecure_channel(self.health_address, options=RECONNECTS) as channel:
            request = health_pb2.HealthCheckRequest(service="readiness")
            states = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=START_SECONDS)
            next(state for state in states if state.status == health_pb2.HealthCheckResponse.SERVING)


class RemoteSampler(Sampler):
    """A replica's samples and adapters, as its API server would use them. Calls do not block."""

    def __init__(self, replica: PoolReplica, root: str, base: BaseModelInfo) -> None:
        self._checkpoints = CheckpointRoot(root)
        self._base = base
        self._channel = grpc.secure_channel(replica.address, replica.credentials(), replica.channel_options)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._adapters: dict[str, worker_pb2.AdapterRef] = {"": worker_pb2.AdapterRef()}
        self._ids: dict[str, str] = {}  # by the ids of jobs: to a replica the same id is the same sample

    @override
    def load_adapter(self, adapter_key: str, state: AdapterState) -> None:
        """Save the adapter where the replica finds it."""
        if adapter_key in self._adapters:
            return
        seq_id = len(self._adapters)
        written = self._checkpoints.write(f"s-{id(self)}", seq_id, 1, "sampler", state, self._base, "ephemeral")
        self._adapters[adapter_key] = worker_pb2.AdapterRef(
            directory=written.directory, manifest_digest=written.manifest_digest
        )

    @override
    def has_adapter(self, adapter_key: str) -> bool:
        return adapter_key in self._adapters

    @override
    def drop_adapter(self, adapter_key: str) -> None:
        self._adapters.pop(adapter_key, None)

    @override
    def submit(self, job: SampleJob, done: Callable[[SampleOutcome], None]) -> None:
        request_id = self._ids[job.request_id] = f"{job.request_id}-{next(_numbers)}"
        request = sample_request(replace(job, request_id=request_id), self._adapters[job.adapter_key])
        self._stub.Sample(request, metadata=metadata_of(job.tenant))
        threading.Thread(target=lambda: done(self._outcome(request_id)), daemon=True).start()

    @override
    def cancel(self, request_id: str) -> None:
        self._stub.CancelSample(worker_pb2.CancelSampleRequest(request_id=self._ids.get(request_id, request_id)))

    @override
    def stats(self) -> SamplerStats:
        metrics = self._stub.Describe(worker_pb2.DescribeRequest()).metrics
        return SamplerStats(
            metrics.samples_active,
            metrics.samples_waiting,
            metrics.sampled_tokens,
            metrics.prefilled_tokens,
            metrics.prefix_hit_tokens,
            metrics.sample_seconds,
        )

    @override
    def close(self) -> None:
        """Leaves the replica to others."""
        self._channel.close()

    def _outcome(self, request_id: str) -> SampleOutcome:
        request = worker_pb2.AwaitSampleRequest(request_id=request_id, timeout_seconds=START_SECONDS)
        reply = self._stub.AwaitSample(request)
        if reply.HasField("result"):
            return decode_outcome(reply.result.payload)
        return SampleOutcome(error=_error(reply.failure))


def metadata_of(tenant: str) -> tuple[tuple[str, bytes], ...]:
    """Return the call's metadata as a server sends it."""
    return ((TENANT_METADATA, tenant.encode()),)


def sample_request(job: SampleJob, adapter: worker_pb2.AdapterRef | None = None) -> worker_pb2.SampleRequest:
    params, targets = job.params, job.target_prompt_logprobs
    return worker_pb2.SampleRequest(
        request_id=job.request_id,
        adapter=adapter,
        prompt_tokens=job.prompt.astype("<i4").tobytes(),
        num_samples=job.num_samples,
        max_tokens=params.max_tokens,
        seed=None if params.seed is None else params.seed % 2**64,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        has_stop=params.stop_tokens is not None or params.stop_strings is not None,
        stop_tokens=params.stop_tokens or (),
        stop_strings=params.stop_strings or (),
        prompt_logprobs=job.prompt_logprobs,
        prompt_logprobs_last_n=job.prompt_logprobs_last_n,
        topk_prompt_logprobs=job.topk_prompt_logprobs,
        topk_sample_logprobs=job.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else encode_dense(targets),
        prompt_alt_tokens_k=job.prompt_alt_tokens_k,
    )


def decode_outcome(payload: bytes) -> SampleOutcome:
    response = wire_pb2.SampleResponse.FromString(payload)
    sequences = tuple(
        Sequence(
            np.frombuffer(sequence.tokens, "<i4"),
            np.frombuffer(sequence.logprobs, "<f4"),
            stopped=sequence.stop_reason == wire_pb2.STOP,
            topk_logprobs=_topk(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
        )
        for sequence in response.sequences
    )
    scores = np.frombuffer(response.prompt_logprobs, "<f4") if response.HasField("prompt_logprobs") else None
    return SampleOutcome(
        sequences,
        scores,
        response.prompt_cache_hit_tokens,
        topk_prompt_logprobs=_topk(response.topk_prompt_logprobs)
        if response.HasField("topk_prompt_logprobs")
        else None,
        target_prompt_logprobs=(
            _floats(response.target_prompt_logprobs) if response.HasField("target_prompt_logprobs") else None
        ),
        prompt_alt_tokens=_alternatives(response.prompt_alt_tokens) if response.HasField("prompt_alt_tokens") else None,
    )


def _topk(message: wire_pb2.TopkLogprobs) -> TopkLogprobs:
    shape = (message.length, message.k)
    return TopkLogprobs(
        np.frombuffer(message.token_ids, "<i4").reshape(shape), np.frombuffer(message.logprobs, "<f4").reshape(shape)
    )


def _floats(message: wire_pb2.Tensor) -> NDArray[np.float32]:
    return decode_tensor("an answer", message).astype(np.float32)


def _alternatives(message: wire_pb2.PromptAltTokens) -> AltTokens:
    return AltTokens(decode_tensor("an answer", message.tokens).astype(np.int32), _floats(message.logprobs))


def _error(failure: worker_pb2.Failure) -> TrainerError:
    return (UserError if failure.category == worker_pb2.USER else ServerError)(failure.message)
