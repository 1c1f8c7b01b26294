from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from tinsmith_trainer.engines.megatron.model import cpu_megatron as module
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.errors import ServerError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers for itself")


def _what_is_replaced() -> list[Any]:
    return [torch.cuda.current_device, torch.cuda.synchronize, CudaRNGStatesTracker.fork]


@without_gpu
def test_inside_the_gpu_is_the_cpu() -> None:
    with cpu_megatron():
        torch.cuda.synchronize()
        tensors = [
            torch.zeros(2, device="cuda"),
            torch.empty(2, device=torch.device("cuda", 0)),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(device=torch.cuda.current_device()),
        ]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        assert torch.ones(2).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        with CudaRNGStatesTracker().fork():
            assert torch.ones(2).sum() == 2


@without_gpu
def test_nothing_stays_replaced_after_an_error_inside_or_a_second_entry() -> None:
    before = _what_is_replaced()
    with cpu_megatron(), cpu_megatron():
        assert not any(now is then for now, then in zip(_what_is_replaced(), before, strict=True))
    assert _what_is_replaced() == before
    with pytest.raises(KeyError), cpu_megatron():
        raise KeyError("a layer")
    assert _what_is_replaced() == before


def test_nothing_is_replaced_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _what_is_replaced()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with cpu_megatron():
        assert _what_is_replaced() == before


@without_gpu
def test_a_megatron_that_this_was_not_written_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed_version", "0.17.0")
    before = _what_is_replaced()
    with pytest.raises(ServerError, match=r"megatron-core 0\.16\.x, but 0\.17\.0 is installed"), cpu_megatron():
        pytest.fail("it was entered")
    assert _what_is_replaced() == before
