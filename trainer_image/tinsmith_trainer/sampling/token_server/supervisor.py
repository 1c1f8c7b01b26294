"""Runs a command for as long as somebody holds the other end of a pipe: `python -m …supervisor FD COMMAND…`.

A server has processes of its own, which outlive it when it is killed. So it runs in a session, and all of that ends
when the holder does, however the holder dies; the command's own exit status is passed on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import NoReturn

STOP_SECONDS = 10.0
"""From the request to end until all of the session is killed. TINSMITH_SUPERVISOR_STOP_SECONDS says otherwise."""


def main(descriptor: int, command: list[str]) -> NoReturn:
    try:
        child = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}.", file=sys.stderr, flush=True)
        os._exit(127)
    threading.Thread(target=_stop_when_pipe_closes, args=(descriptor, child), daemon=True).start()
    status = child.wait()
    _kill(child, signal.SIGKILL)  # its workers, if it left some behind
    os._exit(status if status >= 0 else 128 - status)


def _stop_when_pipe_closes(descriptor: int, child: subprocess.Popen[bytes]) -> None:
    """Nobody ever writes: end of file means that the holder is gone, or wants this."""
    os.read(descriptor, 1)
    _kill(child, signal.SIGTERM)
    seconds = float(os.environ.get("TINSMITH_SUPERVISOR_STOP_SECONDS", STOP_SECONDS))
    threading.Timer(seconds, _kill, (child, signal.SIGKILL)).start()


def _kill(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
