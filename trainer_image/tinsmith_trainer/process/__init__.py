"""Python's garbage collector while modules are imported: it looks through all that is there, again and again, and what
was imported stays.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_pause() -> Iterator[None]:
    """Collects nothing meanwhile; what is there then is not looked through again before the process ends.

    Then it is, since libraries count what they find left over, and complain.
    """
    gc.disable()
    atexit.register(gc.unfreeze)
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
