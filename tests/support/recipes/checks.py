"""Checks of a program's run, each with its description."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from support.recipes.names import VOCAB_SIZE
from support.recipes.running import Run

UNIFORM_NATS = math.log(VOCAB_SIZE)
LAST = 5
"""The rows by which an ending is judged: one step of random samples says little."""


@dataclass(frozen=True, slots=True)
class Check:
    says: str
    holds: Callable[[Run], bool]
    shows: Callable[[Run], object]
    """The observed value."""

    def problem(self, run: Run) -> str | None:
        """Return the failure, or None. A metric that was never written fails its check."""
        try:
            holds = self.holds(run)
        except IndexError:
            holds = False
        return None if holds else f"{self.says}: {self.shows(run)}"


def problems(run: Run, checks: Sequence[Check]) -> list[str]:
    """Return the failures among the checks of every program and of this one."""
    return [problem for check in (*OF_ALL, *checks) if (problem := check.problem(run)) is not None]


def steps(metric: str, count: int) -> Check:
    return Check(f"{count} rows of `{metric}`", lambda run: len(run.series(metric)) == count, _series(metric))


def starts_near(metric: str, value: float, within: float) -> Check:
    return Check(
        f"`{metric}` starts at {value:.4g}, within {within:g}",
        lambda run: abs(run.series(metric)[0] - value) <= within,
        _series(metric),
    )


def starts_below(metric: str, value: float) -> Check:
    return Check(f"`{metric}` starts below {value:.4g}", lambda run: run.series(metric)[0] < value, _series(metric))


def stays_near(metric: str, value: float, within: float) -> Check:
    return Check(
        f"`{metric}` is {value:g}, within {within:g}",
        lambda run: bool(run.series(metric)) and all(abs(each - value) <= within for each in run.series(metric)),
        _series(metric),
    )


def stays_between(metric: str, low: float, high: float) -> Check:
    """Check that a metric stays between two bounds, which are excluded."""
    return Check(
        f"{low:g} < `{metric}` < {high:.4g}",
        lambda run: bool(run.series(metric)) and all(low < each < high for each in run.series(metric)),
        _series(metric),
    )


def ends_below(metric: str, value: float) -> Check:
    return Check(f"`{metric}` ends below {value:g}", lambda run: run.series(metric)[-1] < value, _series(metric))


def ends_above(metric: str, value: float) -> Check:
    """Check the median of the last rows."""
    return Check(f"`{metric}` ends above {value:g}", lambda run: _ending(run.series(metric)) > value, _series(metric))


def falls(metric: str, by: float = 0.0) -> Check:
    said = f"`{metric}` falls" + (f" by {by:g}" if by else "")
    return Check(said, lambda run: _ending(run.series(metric)) < run.series(metric)[0] - by, _series(metric))


def rises(metric: str) -> Check:
    return Check(f"`{metric}` rises", lambda run: _ending(run.series(metric)) > run.series(metric)[0], _series(metric))


def same(metric: str, other: str) -> Check:
    return Check(
        f"`{metric}` is `{other}`, to the bit",
        lambda run: bool(run.series(metric)) and run.series(metric) == run.series(other),
        lambda run: (run.series(metric), run.series(other)),
    )


def calls(**requests: int) -> Check:
    """Check how often these routes were called, and answered."""
    said = ", ".join(f"{count} `{route}`" for route, count in requests.items())
    return Check(said, lambda run: all(run.requests[route] == count for route, count in requests.items()), _requests)


def calls_at_least(**requests: int) -> Check:
    said = ", ".join(f"{count} `{route}` or more" for route, count in requests.items())
    return Check(said, lambda run: all(run.requests[route] >= count for route, count in requests.items()), _requests)


def ran(operations: int) -> Check:
    return Check(
        f"{operations} operations ran, each once",
        lambda run: run.operations["done"] == operations,
        lambda run: dict(run.operations),
    )


def checkpoints(*names: str) -> Check:
    return Check(
        f"checkpoints {', '.join(names)}",
        lambda run: [row["name"] for row in run.checkpoints] == [*names],
        lambda run: [row["name"] for row in run.checkpoints],
    )


def prints(text: str) -> Check:
    return Check(f"it prints “{text}”", lambda run: text in run.output, lambda run: run.output[-2000:])


def _ending(series: Sequence[float]) -> float:
    return statistics.median(series[-LAST:] if len(series) >= 2 * LAST else series[-1:])


def _series(metric: str) -> Callable[[Run], object]:
    return lambda run: run.series(metric)


def _requests(run: Run) -> object:
    return {route: count for route, count in run.requests.items() if count}


LOSS = "train_mean_nll"
UNIFORM_LOSS = starts_near(LOSS, 6.25, 0.35)
"""The loss of an untrained model in supervised recipes: a random one knows nothing."""
UNIFORM_AT_FIRST = starts_near("optim/entropy", UNIFORM_NATS, 0.25)
"""The reward of an untrained model in reward recipes, at the greatest uncertainty."""
SAMPLER_IS_TRAINER = stays_between("optim/kl_sample_train_v2", -1e-4, 1e-4)
"""Logprobs of sampled tokens, as the sampler said them and as the trainer finds them."""
OF_ALL = (
    Check("no operation failed", lambda run: run.operations["failed"] == 0, lambda run: dict(run.operations)),
    Check(
        "each checkpoint that it notes is listed by the server",
        lambda run: run.paths() <= run.stored,
        lambda run: run.paths() - run.stored,
    ),
)
