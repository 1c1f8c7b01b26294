"""The program `python3 -m tinsmith_operator`: one operator, configured by its environment, until SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from pydantic import ValidationError

from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.client import Permit
from tinsmith_operator.logs import configure_logs, get_logger
from tinsmith_operator.runtime.running import Operator
from tinsmith_operator.settings import Settings, unknown_variables

log = get_logger("tinsmith_operator")


async def operate(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    operator = Operator(settings, around_permit=lambda permit: dying_before(settings.failpoint, permit))
    await operator.run(stop)


def main() -> int:
    try:
        settings = Settings.model_validate({})
    except ValidationError as error:
        for problem in error.errors():
            place = "_".join(str(part) for part in problem["loc"]).upper()
            print(f"TINSMITH_OPERATOR_{place}: {problem['msg']}", file=sys.stderr)
        return 2
    configure_logs(settings.log_level)
    for name in unknown_variables():
        log.warning("unknown variable, without effect", name=name)
    try:
        asyncio.run(operate(settings))
    except OperatorError as error:
        log.error("the operator exits", error=str(error))
        return 1
    return 0


def dying_before(write: int, permit: Permit) -> Permit:
    """Return a permit that kills the process at write number `n`, counted from 1; 0 means never."""
    if write == 0:
        return permit
    left = write

    def permit_or_die() -> float:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return permit()

    return permit_or_die


if __name__ == "__main__":
    sys.exit(main())
