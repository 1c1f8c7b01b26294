"""The operator of `operator_scale.py`, which calls all workers at one local port.

The arguments are the directory of the certificates and the port. The settings come from environment variables.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from operator_scale_workers import local, read_leaf
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.logs import configure_logs
from tinsmith_operator.runtime.running import Operator
from tinsmith_operator.runtime.worker_client import GrpcDescriber, Target
from tinsmith_operator.settings import Settings


async def main() -> None:
    settings = Settings.model_validate({})
    configure_logs(settings.log_level)
    leaf, port = read_leaf(Path(sys.argv[1]), "operator"), int(sys.argv[2])
    describer = GrpcDescriber(lambda: leaf)

    async def describe(target: Target) -> WorkerReport:
        return await describer(local(target, port))

    operator, stop = Operator(settings, describe=describe), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await operator.run(stop)


if __name__ == "__main__":
    asyncio.run(main())
