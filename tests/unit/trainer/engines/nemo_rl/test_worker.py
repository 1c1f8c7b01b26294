"""The worker class itself, on Megatron's real layers, optimizer and gradients, where a stand-in has built them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from support.engine.contract import forward_backward, spec
from support.engine.datums import policy_datum, sft_datum
from support.nemo_rl.engines import engine_over, in_process_engine
from support.nemo_rl.one_worker import ONE, OneWorker, one_worker, tiny_sizes
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import AdamParams, Engine, LossSpec
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.nemo_rl import schedule
from tinsmith_trainer.engines.nemo_rl.group import CALL, CALL_SHARDED, START, WORKER
from tinsmith_trainer.errors import ServerError, UserError

SETTINGS = MegatronSettings(adapter_slots=2, max_rank=8)


@pytest.fixture
def on_the_cpu() -> Engine:
    """Make this process the only rank of its process group."""
    return in_process_engine(SETTINGS)


@pytest.fixture
def worker(on_the_cpu: Engine, fake_nemo_rl: None) -> Any:
    made = one_worker(tiny_sizes(SETTINGS.max_rank))
    made.ts_start(parallelism=ONE)
    return made


@pytest.fixture
def engine(worker: Any) -> Engine:
    return engine_over(OneWorker(worker), tiny_model("qwen3"), SETTINGS)


def test_ray_offers_its_methods_to_the_driver_by_the_names_and_keywords_that_are_called(fake_nemo_rl: None) -> None:
    module, _, name = WORKER.rpartition(".")
    actor = getattr(importlib.import_module(module), name)
    offered = actor.__ray_metadata__.method_meta.signatures
    keywords = {
        method: {parameter.name for parameter in offered[method]} - {"_ray_trace_ctx"}
        for method in (START, CALL, CALL_SHARDED)
    }
    assert keywords[START] == {"parallelism"}
    assert keywords[CALL] == {"method", "arguments"}
    assert keywords[CALL_SHARDED] == {"shard", "method", "arguments"}


def test_megatron_compiles_nothing_in_a_read_only_folder(worker: Any, fake_nemo_rl: None) -> None:
    """The stand-in of Megatron's compiler ends the process. Others get it back."""
    from megatron.bridge.training import initialize

    with pytest.raises(SystemExit):
        initialize.compile_helpers()


def test_a_gradient_that_is_not_a_number_does_not_end_the_rank(worker: Any) -> None:
    assert worker.model.bucket_groups
    assert not any(bucket.ddp_config.check_for_nan_in_grad for bucket in worker.model.bucket_groups)


def test_several_steps_of_two_adapters_are_those_of_ranks_on_the_cpu(engine: Engine, on_the_cpu: Engine) -> None:
    """Losses of both alignments, several calls a step, another learning rate each time, adapters in turn."""
    calls = [
        (LossSpec("cross_entropy"), [sft_datum(5), sft_datum(9), sft_datum(2)]),
        (LossSpec("importance_sampling"), [policy_datum(7), policy_datum(4)]),
    ]
    for name in ("a", "b"):
        for one in (engine, on_the_cpu):
            one.create_adapter(name, spec(one, rank=4, seed=ord(name)))
    for step, name in enumerate(["a", "b", "a", "a"]):
        for loss, datums in calls:
            computed, expected = (
                forward_backward(one, datums, adapter=name, loss=loss) for one in (engine, on_the_cpu)
            )
            for got, want in zip(computed.outputs, expected.outputs, strict=True):
                np.testing.assert_allclose(got["logprobs"], want["logprobs"], atol=2e-5)
            assert computed.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-4)
        params = AdamParams(learning_rate=1e-3 * (step + 1), eps=1e-3, grad_clip_norm=1.0)
        told = [one.optim_step(name, params) for one in (engine, on_the_cpu)]
        assert told[0] == pytest.approx(told[1], rel=1e-4)
    for name in ("a", "b"):
        states = [one.state(name) for one in (engine, on_the_cpu)]
        assert states[0].tensors.keys() == states[1].tensors.keys()
        for key, values in states[1].tensors.items():
            np.testing.assert_allclose(states[0].tensors[key], values, atol=2e-5, err_msg=key)


def test_a_call_that_fails_within_nemo_rl_leaves_no_trace(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.create_adapter("a", spec(engine))
    forward_backward(engine, [sft_datum(5)])
    before = engine.state("a").tensors

    def out_of_memory(*_arguments: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(schedule, "total_loss", out_of_memory)
        with pytest.raises(ServerError, match="CUDA out of memory"):
            forward_backward(engine, [sft_datum(9)])
    after = engine.state("a").tensors
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_an_error_of_the_client_is_returned_as_a_client_error(engine: Engine) -> None:
    engine.create_adapter("a", spec(engine))
    with pytest.raises(UserError, match="learning_rate"):
        engine.optim_step("a", AdamParams(learning_rate=float("nan")))
