"""Comparison of the programs of two runs: bit for bit, or within the rounding of `numerics: fast`.

With `numerics: fast` two undisturbed runs differ too, because the forwards that their calls share depend on time. So
the distance of two undisturbed runs is the unit. A run with kills may be some times as far from an undisturbed run. A
step that is lost or doubled would move an adapter by a step, which is thousands of times as far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MOST_TIMES_AS_FAR = 20.0
LEAST_DISTANCE = 1e-6
"""The distance that float32 allows, in case two undisturbed runs are equal by luck."""

Numbers = Sequence[float]


@dataclass
class Ending:
    """The answers to a program, and its results. `drawn` are samples, which may differ after any rounding."""

    rounds: int = 0
    answers: list[Numbers] = field(default_factory=list)
    drawn: list[Numbers] = field(default_factory=list)
    tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)


def differences(disturbed: Mapping[str, Ending], undisturbed: Mapping[str, Ending]) -> list[str]:
    """Return a sentence for each program with other answers or results, bit for bit."""
    found = []
    for name, one in disturbed.items():
        other = undisturbed[name]
        for kind in ("answers", "drawn"):
            pairs = enumerate(zip(getattr(one, kind), getattr(other, kind), strict=True))
            first = next((f"{i}: {str(a)[:200]} / {str(b)[:200]}" for i, (a, b) in pairs if a != b), None)
            if first is not None:
                found.append(f"{name}: {kind} {first}")
        unequal = [key for key in one.tensors if one.tensors[key].tobytes() != other.tensors[key].tobytes()]
        if unequal:
            found.append(f"{name}: {len(unequal)} of {len(one.tensors)} tensors differ, {unequal[:3]}")
    return found


def beyond_rounding(
    disturbed: Mapping[str, Ending], undisturbed: Mapping[str, Ending], again: Mapping[str, Ending]
) -> list[str]:
    """Return a sentence for each program that is further from `undisturbed` than rounding explains.

    `again` is a second undisturbed run, which tells how far rounding goes.
    """
    found = []
    for name, one in disturbed.items():
        for measure in (distance_of_answers, distance_of_weights):
            apart, usual = measure(one, undisturbed[name]), measure(again[name], undisturbed[name])
            print(f"{name}: {measure.__name__} {apart:.1e}, of two undisturbed runs {usual:.1e}")
            if not apart <= MOST_TIMES_AS_FAR * max(usual, LEAST_DISTANCE):
                found.append(f"{name}: {measure.__name__} is {apart:.1e}, and of two undisturbed runs {usual:.1e}")
    return found


def distance_of_answers(one: Ending, other: Ending) -> float:
    """Return the relative distance of all numbers of all answers, which must be equally many."""
    pairs = list(zip(one.answers, other.answers, strict=True))
    return _relative([np.asarray(a) for a, _ in pairs], [np.asarray(b) for _, b in pairs])


def distance_of_weights(one: Ending, other: Ending) -> float:
    """Return the relative distance of weights and optimizer state."""
    assert one.tensors.keys() == other.tensors.keys()
    return _relative(list(one.tensors.values()), [other.tensors[key] for key in one.tensors])


def _relative(found: Sequence[NDArray[np.floating]], expected: Sequence[NDArray[np.floating]]) -> float:
    apart = sum(float(np.square(a.astype(float) - b).sum()) for a, b in zip(found, expected, strict=True))
    whole = sum(float(np.square(b.astype(float)).sum()) for b in expected)
    return float(np.sqrt(apart / whole))
