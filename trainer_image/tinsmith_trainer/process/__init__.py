"""The process itself: its start, output, exit, and the work that it is doing.

The garbage collector is paused during imports, since it would scan all imported objects again and again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_pause() -> Iterator[None]:
    """Pause garbage collection, and exclude the objects that exist at the end from later collections.

    They are collected at exit, since some libraries warn about objects that remain.
    """
    gc.disable()
    atexit.register(gc.unfreeze)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
