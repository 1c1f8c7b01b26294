"""Where base weights live, and how precisely."""

from __future__ import annotations

import torch

from tinsmith_trainer.errors import ServerError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def place(device: str, dtype: str) -> tuple[str, torch.dtype]:
    """What `--device` and `--dtype` come to on this machine. Raises ServerError for a GPU that is not there.

    A GPU gets bfloat16, for which it has its fastest units; the CPU float32, in which engines keep bits.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ServerError(
            "--device cuda: this process sees no GPU. Give it one, with a driver and a PyTorch built for CUDA, "
            "or leave --device out."
        )
    chosen = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    automatic = torch.bfloat16 if chosen == "cuda" else torch.float32
    return chosen, DTYPES.get(dtype, automatic)
