"""The process: start, output, exit, and the current work.

The garbage collector is paused during imports. Without the pause, the collector would scan all imported objects again
and again.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_pause() -> Iterator[None]:
    """Pause garbage collection. At the end of the pause, exclude all existing objects from later collections.

    The excluded objects are collected at exit, because some libraries warn about objects that remain.
    """
    gc.disable()
    atexit.register(gc.unfreeze)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
