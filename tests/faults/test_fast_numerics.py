"""A worker with `numerics: fast` dies at every place that matters: answers stay, and replays differ only by rounding.

An engine that rounds differently in every process takes the place of a GPU. The comparison of weights would notice a
step that is lost or doubled, and a test shows that it does.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load
from support.engine.rounding import DOUBLED, FAULT_VARIABLE, LOST
from support.worker.process import WorkerProcess, as_compared, run_program
from tinsmith_trainer.process.failpoints import FAILPOINTS

from .test_worker_cut_points import EAGER, PROGRAM, REACHED

ENGINE = ("--engine", "support.engine.rounding:build_rounding")
ARRIVAL = {name: min(2, count) for name, count in REACHED.items() if count}
"""The arrival of each place at which the worker dies; the fifth, unless it is reached less often."""
CLOSE = 1e-4
"""The largest distance of weights, as a part of how far training moved them. Rounding of 1e-6 makes about 1e-6."""

Weights = dict[str, NDArray[np.float32]]


async def trained(
    folder: Path, *flags: str, dies_at: str | None = None, fault: str | None = None
) -> tuple[Weights, int]:
    """Run the program, and return the final weights and how often the worker died."""
    each_life = {} if fault is None else {FAULT_VARIABLE: fault}
    worker, restarted_at = WorkerProcess(folder, (*ENGINE, *flags), each_life), list[int]()
    try:
        await worker.start(**({} if dies_at is None else {"TINSMITH_FAILPOINT": dies_at}))
        answers = await run_program(worker, PROGRAM, restarted_at)
        assert {seq_id: as_compared(await worker.result(seq_id)) for seq_id in answers} == answers
        saved = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
        assert [event.seq_id for event in saved] == [7, 12, 16]
        files = (folder / "checkpoints" / saved[-1].directory).glob("*.safetensors")
        return {name: values for file in files for name, values in load(file.read_bytes()).items()}, len(restarted_at)
    finally:
        await worker.kill()


def distance(found: Weights, expected: Weights) -> float:
    """Return the distance of all tensors as a part of their length."""
    assert found.keys() == expected.keys()
    apart = sum(float(np.square(found[name] - values, dtype=np.float64).sum()) for name, values in expected.items())
    return float(np.sqrt(apart / sum(float(np.square(values, dtype=np.float64).sum()) for values in expected.values())))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return asyncio.run(trained(tmp_path_factory.mktemp("undisturbed")))[0]


@pytest.mark.parametrize("failpoint", [name for name in FAILPOINTS if REACHED.get(name, 1)])
async def test_a_death_here_changes_weights_by_rounding_alone(
    failpoint: str, undisturbed: Weights, tmp_path: Path
) -> None:
    flags = EAGER if failpoint.startswith("snapshot-") else ()
    place = f"{failpoint}:{ARRIVAL.get(failpoint, 5)}"
    found, deaths = await trained(tmp_path, *flags, dies_at=place)
    assert deaths, "the place was never reached: this case proves nothing"
    assert distance(found, undisturbed) < CLOSE


@pytest.mark.parametrize("fault", [LOST, DOUBLED])
async def test_a_replay_that_loses_or_doubles_a_step_does_not_pass_as_rounding(
    fault: str, undisturbed: Weights, tmp_path: Path
) -> None:
    found, deaths = await trained(tmp_path, dies_at="executed-before-result:9", fault=fault)
    assert deaths
    assert distance(found, undisturbed) > CLOSE
