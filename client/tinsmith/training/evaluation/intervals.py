"""Means over examples with 95 % intervals, and paired differences.

If every value is 0 or 1, the interval is Wilson's score interval (Wilson 1927; Brown, Cai and DasGupta 2001, equation
4). Wilson's interval is accurate for few examples, and for shares near 0 and 1. For other values, the interval is
Student's: mean and standard error as in Miller 2024 (arXiv 2411.00640), with the quantile of t for the number of
examples. The mean of all answers to one example counts as one value, because answers to the same example are not
independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
EXACT_DEGREES = 1000
"""The largest number of degrees of freedom for the exact series, which has one term for each degree of freedom.

For more degrees of freedom, an expansion is accurate to 1e-6.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `examples`, with a 95 % interval. `low` and `high` are NaN if only one value was graded."""

    mean: float
    low: float
    high: float
    examples: int


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate a mean from one value for each example. Raises ValueError for an empty list of values."""
    if not values:
        raise ValueError("a mean needs at least one value")
    if all(value in (0.0, 1.0) for value in values):
        return wilson(round(sum(values)), len(values))
    return student(values)


def wilson(successes: int, examples: int) -> Estimate:
    share, z2 = successes / examples, Z * Z
    centre = (share + z2 / (2 * examples)) / (1 + z2 / examples)
    half = Z / (1 + z2 / examples) * math.sqrt(share * (1 - share) / examples + z2 / (4 * examples**2))
    # Rounding must not exclude the share itself.
    return Estimate(share, min(max(0.0, centre - half), share), max(min(1.0, centre + half), share), examples)


def student(values: Sequence[float]) -> Estimate:
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def paired_difference(first: Mapping[str, float], second: Mapping[str, float]) -> Estimate:
    """Estimate the mean of `second` minus `first` over the common examples.

    Raises ValueError if `first` and `second` have no common example.

    The interval is Student's interval of the differences, so the spread between examples does not make the interval
    wider.
    """
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError("the two have no example in common")
    return student([second[example] - first[example] for example in common])


@lru_cache(maxsize=4096)
def t_quantile(degrees: int) -> float:
    """Return the t for which 95 % of Student's distribution is between -t and t.

    The result is found by bisection of equations 26.7.3 and 26.7.4 of Abramowitz and Stegun. For many degrees of
    freedom, the first term of equation 26.7.5 is used.
    """
    if degrees > EXACT_DEGREES:
        return Z + (Z**3 + Z) / (4 * degrees)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _share_within(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _share_within(angle: float, degrees: int) -> float:
    """Return P(|T| <= t) for t = sqrt(degrees) tan(angle)."""
    sine, cosine2 = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
