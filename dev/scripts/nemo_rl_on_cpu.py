"""Run the tests with the real NeMo RL on the CPU of this machine: `make test-nemo-rl NEMO_RL=… BRIDGE=… MEGATRON=…`."""

from __future__ import annotations

import sys

from backend_on_cpu import ROOT, Backend, Source, run_tests
from package_environment import NEMO_RL as PACKAGES

NEMO_RL = Backend(
    title="NeMo RL",
    sources=(
        Source("nemo-rl", "NEMO_RL"),
        Source("megatron-bridge", "BRIDGE", "src"),
        Source("megatron-lm", "MEGATRON"),
    ),
    packages=PACKAGES,
    shims=ROOT / "tests" / "support" / "nemo_rl" / "on_cpu",
    marker="nemo_rl",
    tests="tests/real_nemo_rl",
)

if __name__ == "__main__":
    sys.exit(run_tests(NEMO_RL, sys.argv[1:]))
