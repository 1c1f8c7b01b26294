"""Python runs this at its start where this folder is on PYTHONPATH: in tests, ranks, and what converts models."""

import nemo_rl_on_cpu

nemo_rl_on_cpu.install()
