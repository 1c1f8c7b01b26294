"""The generations of the tinker SDK, and the differences between generations.

docs/reference/protocol.md has the table. The tests run a whole program with each version in the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """A generation: the versions of the SDK that send the same requests."""

    versions: str
    tested: tuple[str, ...]
    otherwise: str
    """The difference between this generation and the next generation."""


GENERATIONS = (
    Generation(
        "0.3 to 0.5",
        ("0.3.0",),
        "The field of an image's tokens is `tokens`; `load_state` also restores the optimizer. 0.3 lists a run's "
        "checkpoints at `/models/{run}/checkpoints`, and lists neither all checkpoints nor sessions",
    ),
    Generation(
        "0.6 to 0.16",
        ("0.6.3", "0.14.0", "0.16.1"),
        "Results of `forward`, `forward_backward` and `sample` in JSON; chunks without `type`",
    ),
    Generation("0.18", ("0.18.2",), "`forward_backward` in JSON"),
    Generation("0.19 to 0.22.2", ("0.19.0",), "`forward` in JSON, at `/forward`; knows only the first flag"),
    Generation(
        "0.22.3 to 0.24",
        ("0.22.7", "0.24.1"),
        "Sends protobuf only with the flags `proto_write_fwdbwd` and `fwd_via_fwdbwd`",
    ),
    Generation(
        "0.25 to 0.27",
        ("0.25.0",),
        "Fails on lists with external checkpoints, so these are left out; uses `/unload_model` up to 0.25",
    ),
    Generation(
        "0.28 to 0.35", ("0.30.4", "0.34.0"), "Downloads a checkpoint as one archive, by a redirect from `…/archive`"
    ),
    Generation("0.36 to 0.38", ("0.36.0", "0.38.0"), "The latest"),
)
HEADER = ("Versions", "Tested", "Difference")
TESTED = tuple(version for generation in GENERATIONS for version in generation.tested)


def rows() -> Iterator[tuple[str, ...]]:
    """Return the generations, newest first."""
    for generation in reversed(GENERATIONS):
        yield generation.versions, ", ".join(generation.tested), f"{generation.otherwise}."
