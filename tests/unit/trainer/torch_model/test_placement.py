from __future__ import annotations

import pytest
import torch
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.torch_model.device import choose_device


@pytest.mark.parametrize(
    ("gpu", "device", "dtype", "placed"),
    [
        pytest.param(False, "auto", "auto", ("cpu", torch.float32), id="without-a-gpu"),
        pytest.param(True, "auto", "auto", ("cuda", torch.bfloat16), id="with-a-gpu"),
        pytest.param(True, "cpu", "auto", ("cpu", torch.float32), id="a-gpu-left-alone"),
        pytest.param(True, "cuda", "float32", ("cuda", torch.float32), id="precise-on-a-gpu"),
        pytest.param(False, "cpu", "bfloat16", ("cpu", torch.bfloat16), id="small-on-a-cpu"),
    ],
)
def test_a_gpu_is_used_in_bfloat16_where_there_is_one_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, device: str, dtype: str, placed: tuple[str, torch.dtype]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert choose_device(device, dtype) == placed


def test_a_missing_gpu_is_reported_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ServerError, match="--device cuda: this process sees no GPU"):
        choose_device("cuda", "auto")
