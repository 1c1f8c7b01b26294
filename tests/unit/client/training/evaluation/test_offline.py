"""A sweep evaluates each example once at each checkpoint, and a failure affects only itself."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from support.client.checkpoints.fake_server import FakeModel, FakeServer
from support.client.checkpoints.writing import state_path, write
from support.client.scripted_sampling import ScriptedSampling, ScriptedService
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinsmith.training.checkpoints.metadata import directory_name
from tinsmith.training.checkpoints.server_states import start_save
from tinsmith.training.checkpoints.store import CheckpointStore
from tinsmith.training.errors import EvaluationError
from tinsmith.training.evaluation import sources
from tinsmith.training.evaluation.examples import Answer, Example
from tinsmith.training.evaluation.offline import OfflineEvaluator
from tinsmith.training.evaluation.sources import at_path, in_root, of_base_model
from tinsmith.training.evaluation.tasks import Task

pytestmark = pytest.mark.pytorch

FIRST, SECOND = "tinker://run/sampler_weights/step-5", "tinker://run/sampler_weights/step-10"
BOTH = [at_path(FIRST), at_path(SECOND)]


def first_token(_example: Example, answer: Answer) -> float:
    return float(answer.tokens[0])


def task(grade: Callable[[Example, Answer], Any] = first_token, examples: int = 4) -> Task:
    return Task("first", [Example([number]) for number in range(examples)], grade, tokenizer=False)


def server() -> ScriptedService:
    return ScriptedService({path: ScriptedSampling(lambda *_, n=n: [n]) for n, path in enumerate((FIRST, SECOND))})


class OtherEvaluator(SamplingClientEvaluator):
    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, Any]:
        self.calls += 1
        return {"test/nll": 1.5, "eval/OtherEvaluator/bpb": 0.5, "note": "no number"}


def test_each_checkpoint_has_means_by_step(tmp_path: Path) -> None:
    service = server()
    sweep = OfflineEvaluator([task()], tmp_path, connect=service.connect).run(BOTH)
    assert [(one.step, one.estimate.mean, one.estimate.examples) for one in sweep.summaries] == [(5, 0, 4), (10, 1, 4)]
    assert service.sessions == service.closed == 2
    rows = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert (rows[1]["step"], rows[1]["mean"], rows[1]["examples"]) == ("10", "1.0", "4")
    assert float(rows[1]["low"]) == pytest.approx(0.5101, abs=1e-4)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_existing_answers_are_not_requested_again(tmp_path: Path) -> None:
    OfflineEvaluator([task()], tmp_path, connect=server().connect).run(BOTH[:1])
    again, other = server(), OtherEvaluator()
    sweep = OfflineEvaluator([task(), other], tmp_path, connect=again.connect).run([*BOTH, BOTH[1]])
    assert len(again.samplers[FIRST].prompts) == 0
    assert len(again.samplers[SECOND].prompts) == 4
    assert other.calls == 2
    third = server()
    assert OfflineEvaluator([task(), other], tmp_path, connect=third.connect).run(BOTH).summaries == sweep.summaries
    assert (third.sessions, other.calls) == (0, 2)


def test_a_deleted_checkpoint_is_reported_and_skipped(tmp_path: Path) -> None:
    gone = at_path("tinker://run/sampler_weights/step-7")
    sweep = OfflineEvaluator([task()], tmp_path, connect=server().connect).run([BOTH[0], gone, BOTH[1]])
    assert [one.step for one in sweep.summaries] == [5, 10]
    assert list(sweep.gone) == [gone.path]
    assert "the server has no tinker://run/sampler_weights/step-7" in sweep.gone[gone.path]
    assert sweep.failures == []


def test_an_example_that_fails_loses_only_itself_and_is_requested_again(tmp_path: Path) -> None:
    broken = True

    def fails_once(example: Example, answer: Answer) -> float:
        if broken and example.id == "2":
            raise RuntimeError("out of luck")
        return first_token(example, answer)

    sweep = OfflineEvaluator([task(fails_once)], tmp_path, connect=server().connect).run(BOTH[:1])
    assert sweep.failures == ["step-5, task first, example 2: example 2: the grader raised RuntimeError: out of luck"]
    assert [one.estimate.examples for one in sweep.summaries] == [3]
    broken, again = False, server()
    sweep = OfflineEvaluator([task(fails_once)], tmp_path, connect=again.connect).run(BOTH[:1])
    assert (sweep.failures, again.samplers[FIRST].prompts) == ([], [[2]])


def test_no_more_examples_and_checkpoints_are_under_way_than_are_allowed(tmp_path: Path) -> None:
    sampling = ScriptedSampling()
    paths = [f"tinker://run/sampler_weights/{number}" for number in range(5)]
    service = ScriptedService(dict.fromkeys(paths, sampling))
    most = 0

    def connect() -> tinker.ServiceClient:
        nonlocal most
        connected = service.connect()
        most = max(most, service.sessions - service.closed)
        return connected

    evaluator = OfflineEvaluator([task()], tmp_path, connect=connect, concurrency=3, checkpoints_at_once=2)
    evaluator.run([at_path(path) for path in paths])
    assert (sampling.most_under_way, most) == (3, 2)


@pytest.mark.parametrize(
    ("path", "step"),
    [("step-000012", 12), ("step-000012-9f03c77e", 12), ("000040", 40), ("epoch2-7.final", 7), ("final", None)],
)
def test_the_step_is_the_first_number_or_the_last_number_of_a_name(path: str, step: int | None) -> None:
    assert at_path(f"tinker://run:train:0/sampler_weights/{path}").step == step


def test_the_step_of_a_state_that_a_checkpoint_manager_saved_is_the_managers() -> None:
    server = FakeServer()
    saved = start_save(FakeModel(server), directory_name(12), adapter=False, ttl_seconds=None)  # type: ignore[arg-type]
    assert at_path(saved.state.result().path).step == 12


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("run/1", "Invalid"),
        ("tinker://run/external_weights/1", "is an export, which cannot be sampled from; upload its files"),
    ],
)
def test_a_path_without_weights_is_refused(path: str, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        at_path(path)


def test_a_base_model_is_evaluated_without_a_step(tmp_path: Path) -> None:
    service = ScriptedService({"Some/Model": ScriptedSampling()})
    sweep = OfflineEvaluator([task()], tmp_path, connect=service.connect).run([of_base_model("Some/Model")])
    assert [(one.label, one.step, one.estimate.mean) for one in sweep.summaries] == [("Some/Model", None, 7.0)]


class StatesService(ScriptedService):
    """A server of training states. Clients of a state save a sampler without a name."""

    async def create_training_client_from_state(self, path: str, user_metadata: object) -> Any:
        assert user_metadata == {"tinsmith-purpose": "evaluation"}
        sampler = self.samplers[path]

        class Client:
            async def save_weights_and_get_sampling_client(self) -> ScriptedSampling:
                return sampler

        return Client()


def test_the_checkpoints_of_a_run_are_evaluated_from_their_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    with pytest.raises(EvaluationError, match="there are no checkpoints in"):
        in_root(store.url)
    for step in (10, 2, 7):
        write(store, step)
    service = StatesService({state_path(step): ScriptedSampling(lambda *_, n=step: [n]) for step in (2, 7, 10)})
    states = FakeServer()
    states.states = {state_path(2): b"", state_path(10): b""}
    monkeypatch.setattr(sources, "ServerStates", states)
    sweep = OfflineEvaluator([task()], tmp_path / "out", connect=service.connect).run(in_root(store.url))
    assert [(one.label, one.step, one.estimate.mean) for one in sweep.summaries] == [
        ("step 2", 2, 2.0),
        ("step 10", 10, 10.0),
    ]
    assert list(sweep.gone) == [state_path(7)]
    assert service.sessions == service.closed == 3
