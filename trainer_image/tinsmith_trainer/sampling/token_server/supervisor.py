"""A program that runs a command as long as another process holds a pipe open: `python -m …supervisor FD COMMAND…`.

When a server is killed, the server's child processes would continue to run. So each server has a separate session,
whose processes are killed together. All processes of the session end when the process that holds the pipe ends, even if
the holder is killed. The supervisor exits with the command's exit status.
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
"""The time between the request to end a session and the kill of the session.

TINSMITH_SUPERVISOR_STOP_SECONDS overrides this time.
"""


def main(descriptor: int, command: list[str]) -> NoReturn:
    try:
        child = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}.", file=sys.stderr, flush=True)
        os._exit(127)
    threading.Thread(target=_stop_when_pipe_closes, args=(descriptor, child), daemon=True).start()
    status = child.wait()
    _kill(child, signal.SIGKILL)  # child processes that the command left running
    os._exit(status if status >= 0 else 128 - status)


def _stop_when_pipe_closes(descriptor: int, child: subprocess.Popen[bytes]) -> None:
    """Stop the session when the pipe closes.

    The holder of the pipe never writes. End of file means that the holder has ended or requests a stop.
    """
    os.read(descriptor, 1)
    _kill(child, signal.SIGTERM)
    seconds = float(os.environ.get("TINSMITH_SUPERVISOR_STOP_SECONDS", STOP_SECONDS))
    threading.Timer(seconds, _kill, (child, signal.SIGKILL)).start()


def _kill(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
