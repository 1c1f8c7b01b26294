"""Run the tests with the real Miles on the CPU of this machine: `make test-miles MILES=… MEGATRON=… BRIDGE=…`."""

from __future__ import annotations

import sys

from backend_on_cpu import ROOT, Backend, Source, run_tests
from package_environment import MILES as PACKAGES

MILES = Backend(
    title="Miles",
    sources=(
        Source("miles", "MILES"),
        Source("miles.megatron", "MEGATRON"),
        Source("miles.bridge-on-cpu", "BRIDGE", "src"),
    ),
    packages=PACKAGES,
    shims=ROOT / "tests" / "support" / "miles" / "on_cpu",
    marker="miles",
    tests="tests/real_miles",
)

if __name__ == "__main__":
    sys.exit(run_tests(MILES, sys.argv[1:]))
