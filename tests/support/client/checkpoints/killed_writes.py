"""A program whose processes are killed before the first, second, … file operation of a change of the store.

Prints for each process what exists afterwards, as a line of JSON; the last process ends normally. It is a separate
program because it forks, which a process with threads must not do.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from support.client.checkpoints.writing import write
from tinsmith.training.checkpoints.store import CheckpointStore
from tinsmith.training.errors import CheckpointDamaged

KILLED, DONE = 9, 0
ON_FILES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}


def change_all(store: CheckpointStore) -> None:
    write(store, 3)
    store.add_metrics(2, {"reward": 1.0})
    store.remove(1)


def killed_before(operation: int, root: Path) -> bool:
    """Return true if the process came as far as this operation."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    left = operation

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in ON_FILES and str(arguments[0]).startswith(str(root)):
            left -= 1
            if left < 0:
                os._exit(KILLED)

    store = CheckpointStore(str(root))
    sys.addaudithook(count)
    change_all(store)
    os._exit(DONE)


def seen(store: CheckpointStore) -> dict[str, list[int]]:
    steps = store.steps()
    return {"steps": steps, "damaged": [step for step in steps if is_damaged(store, step)]}


def is_damaged(store: CheckpointStore, step: int) -> bool:
    try:
        store.verify(step)
    except CheckpointDamaged:
        return True
    return False


def main(folder: Path) -> None:
    operation, killed = 0, True
    while killed:
        root = folder / str(operation)
        store = CheckpointStore(str(root))
        write(store, 1)
        write(store, 2)
        killed = killed_before(operation, root)
        after = seen(store)
        for name in store.leftovers():
            store.remove_leftover(name)
        if 3 not in store.steps():
            write(store, 3)
        again = {"again": store.steps(), "leftovers": store.leftovers(), "others": sorted(map(str, root.glob(".*")))}
        print(json.dumps({"killed": killed, **after, **again}))
        operation += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
