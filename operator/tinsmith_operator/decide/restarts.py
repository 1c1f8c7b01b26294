"""How often the worker was started again, by cause."""

from __future__ import annotations

from tinsmith_operator.decide.pod import Pod
from tinsmith_operator.model.status import CountedPod, Restarts


def count_restarts(before: Restarts, pod: Pod | None, *, is_hung: bool) -> Restarts:
    """Adds what has happened to this pod since it was last counted. Counting twice what is there adds it once."""
    if pod is None:
        return before
    counted = (
        before.counted if before.counted is not None and before.counted.uid == pod.uid else CountedPod(uid=pod.uid)
    )
    new = max(0, pod.restarts - counted.container_restarts)
    ending = pod.latest_ending
    out_of_memory = new if ending is not None and ending.out_of_memory else 0
    crashed = new if ending is not None and not ending.out_of_memory and ending.exit_code != 0 else 0
    return Restarts(
        crash=before.crash + crashed,
        out_of_memory=before.out_of_memory + out_of_memory,
        hang=before.hang + (1 if is_hung and not counted.hung else 0),
        counted=CountedPod(
            uid=pod.uid,
            container_restarts=max(pod.restarts, counted.container_restarts),
            hung=is_hung or counted.hung,
        ),
    )
