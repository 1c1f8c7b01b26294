"""Faults that spoil a device for the whole process, as opposed to the failure of one call."""

from __future__ import annotations

import pytest
import torch
from tinsmith_trainer.torch_model import device
from tinsmith_trainer.torch_model.device import end_if_device_is_lost, is_device_fault, needs_device


def accelerator_error(text: str, code: int) -> Exception:
    """Return the error as this torch raises it; before 2.8 it had no class of its own."""
    kind = getattr(torch, "AcceleratorError", None)
    return kind(text, code) if kind is not None else RuntimeError(text)


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error("CUDA error: device-side assert triggered", 710),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    ],
    ids=str,
)
def test_a_fault_of_the_device_is_known_by_its_class_or_its_text(error: Exception) -> None:
    assert is_device_fault(error)


def test_an_engine_that_lost_its_device_ends_the_process_and_its_call_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(device, "end_process", ends.append)
    with pytest.raises(RuntimeError, match="shapes"), needs_device():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert ends == []
    with pytest.raises(RuntimeError, match="CUDA"), needs_device():
        raise RuntimeError("CUDA error: device-side assert triggered")
    assert ends == ["the device is lost to this process"]


def test_a_sampler_that_lost_its_device_ends_the_process_and_blames_no_call_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(device, "end_without_blame", lambda: ends.append("without blame"))
    end_if_device_is_lost(RuntimeError("the prompt was too long"))
    assert ends == []
    end_if_device_is_lost(RuntimeError("CUDA error: device-side assert triggered"))
    assert ends == ["without blame"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        accelerator_error("CUDA error: out of memory", 2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        accelerator_error("CUDA error: operation not permitted when stream is capturing", 900),
        accelerator_error("CUDA error: operation failed due to a previous error during capture", 901),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("CUDA error is what the prompt was about"),
    ],
    ids=str,
)
def test_a_call_that_lacked_memory_or_was_wrong_leaves_the_device_to_the_next(error: Exception) -> None:
    assert not is_device_fault(error)
