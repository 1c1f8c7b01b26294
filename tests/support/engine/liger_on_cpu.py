"""A program, run with TRITON_INTERPRET=1: Liger's kernel as it is published, on the CPU. Prints what came out right.

In a process of its own, since Triton asks for the variable when it is first imported.
"""

from __future__ import annotations

import torch
from support.engine.logprob_cases import Case, assert_alike
from tinsmith_trainer.engines.peft.logprobs import TRIAL_TOLERANCE, trial

VOCABULARY = 300
A_FEW_TOKENS = 7 * VOCABULARY * 2
CASES = {
    "without an adapter": Case(dtype=torch.bfloat16, rank=0),
    "an adapter of the projection": Case(dtype=torch.bfloat16),
    "several targets": Case(dtype=torch.bfloat16, targets=3),
    "a bias": Case(dtype=torch.bfloat16, bias=True),
    "float64": Case(dtype=torch.float64, targets=2),
    "large logits": Case(dtype=torch.float64, spread=400.0),
}


def main() -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # some machines advertise AMX and trap on it
        for name, case in CASES.items():
            assert_alike(case, kernel="liger")
            print(name, flush=True)
        assert_alike(CASES["several targets"], A_FEW_TOKENS, kernel="liger")
        print("in chunks", flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        difference = trial(torch.device("cpu"), dtype)
        assert difference <= TRIAL_TOLERANCE, difference
    print("the trial", flush=True)


if __name__ == "__main__":
    main()
