"""A Python that runs programs in forks of one process, which has imported their modules once.

Each import would take four seconds of CPU. It reads a line of JSON for each program, and writes its exit status. Forked
programs share only modules: no thread runs at the fork.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Sequence

IMPORTED = (
    *("datasets", "tinker", "torch", "transformers"),
    *("tinker_cookbook.rl.train", "tinker_cookbook.supervised.train", "tinker_cookbook.recipes.math_rl.math_env"),
)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            # What it starts ends with it, where it is ended.
            os.setsid()
            _become(asked["folder"], asked["environment"], asked["input"], asked["output"])
            _run(asked["command"])
            break
        print(json.dumps({"pid": pid}), flush=True)
        print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


def _become(folder: str, environment: dict[str, str], reads: str, writes: str) -> None:
    for number, path, flags in ((0, reads, os.O_RDONLY), (1, writes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(path, flags, 0o600), number)
    os.dup2(1, 2)
    # What the old one has read ahead is not this program's.
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def _run(command: Sequence[str]) -> None:
    """Run the program. Its error ends this process as it ends any other."""
    if command[0] == "-m":
        sys.argv = [*command[1:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*command]
        sys.path[0] = os.path.dirname(command[0])
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
