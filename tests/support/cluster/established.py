"""When objects of a new kind can be made.

`kubectl wait` does not say: right after its creation a CRD has no conditions at all, which it takes for an error,
whether it is asked for a condition or for a JSON path.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from support.cluster.errors import ClusterError

ESTABLISHED_SECONDS = 60.0


def wait_established(kubectl: Callable[..., str], *crds: str) -> None:
    """`crds`: their names, or `--filename=…` of where they are written."""
    ends_at = time.monotonic() + ESTABLISHED_SECONDS
    what = () if crds[0].startswith("--") else ("crd",)
    while True:
        found = json.loads(kubectl("get", *what, *crds, "--output=json"))
        waiting = [crd["metadata"]["name"] for crd in found.get("items", [found]) if not _is_established(crd)]
        if not waiting:
            return
        if time.monotonic() > ends_at:
            raise ClusterError(f"not established in {ESTABLISHED_SECONDS:.0f} s: {', '.join(waiting)}")
        time.sleep(0.2)


def wait_explained(kubectl: Callable[..., str], kind: str) -> None:
    """Until `kubectl` can check an object of it: discovery and OpenAPI hear of an established CRD a moment later."""
    ends_at = time.monotonic() + ESTABLISHED_SECONDS
    while True:
        try:
            kubectl("explain", kind)
        except ClusterError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.2)
        else:
            return


def _is_established(crd: dict[str, Any]) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []
    return any((each["type"], each["status"]) == ("Established", "True") for each in conditions)
