"""Which `kubectl logs` shows the workers of a session or pool."""

from __future__ import annotations

from tinsmith.cluster.errors import NotFound
from tinsmith.cluster.families import Family
from tinsmith.cluster.health import judge
from tinsmith.cluster.manifests import name_of
from tinsmith.cluster.names import Kind

MOST_STREAMS = 64
"""kubectl follows five at once by itself."""


def log_words(family: Family, *, follow: bool, previous: bool, since: str | None) -> list[str]:
    """The arguments of kubectl, in the family's namespace. Raises NotFound where there is no pod, and says why."""
    if not family.pods:
        verdict = judge(family)
        raise NotFound(f"{family.title} has no pod now. It is {verdict.headline}: {verdict.message}")
    options = {"--follow": follow, "--previous": previous}
    words = [option for option, wanted in options.items() if wanted]
    words += [f"--since={since}"] if since is not None else []
    return ["logs", *_which(family), *words]


def _which(family: Family) -> list[str]:
    """kubectl shows the last ten lines alone of pods that are chosen by a label, unless told otherwise."""
    if family.kind is Kind.SESSION:
        return [name_of(family.pods[0])]
    chosen = f"--selector={family.kind.label}={family.name}"
    return [chosen, "--prefix", "--tail=-1", f"--max-log-requests={MOST_STREAMS}"]
