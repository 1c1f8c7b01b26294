"""Recorded sequences as data for losses: shifted by one, with an advantage for each token that was sampled once."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tinker import types
from tinsmith.training import recording as module
from tinsmith.training.errors import NotOffered, RecordingRefused
from tinsmith.training.recording import Recording, group_datums

SEGMENT = {
    "turn": 1,
    "start": 2,
    "end": 4,
    "reason": "first",
    "model_path": "tiny",
    "weights_digest": "",
    "finish_reason": "stop",
    "sampling_params": {},
    "started_at": "2026-01-01T00:00:00Z",
}
SEQUENCE = {
    "sequence": 1,
    "reason": "first",
    "abandoned": False,
    "tokens": [5, 6, 7, 8, 9],
    "logprobs": [0.0, 0.0, -0.5, -1.5, 0.0],
    "mask": [0, 0, 1, 1, 0],
    "segments": [SEGMENT],
}


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Return a recording with a sequence, and an abandoned one."""
    sequences = [SEQUENCE, {**SEQUENCE, "sequence": 2, "abandoned": True}]
    monkeypatch.setattr(module, "_send", lambda *_arguments, **_options: {"sequences": sequences})
    return Recording({"recording_id": "rec-1", "model": "tiny", "base_url": "http://server/oai"}, None)


def inputs(datum: types.Datum) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}


def test_a_datum_has_the_advantage_at_the_tokens_that_were_sampled(recording: Recording) -> None:
    (datum,) = recording.datums(2.0, baseline=0.5)
    assert datum.model_input.to_ints() == [5, 6, 7, 8]
    assert inputs(datum) == {
        "target_tokens": [6, 7, 8, 9],
        "logprobs": [0.0, -0.5, -1.5, 0.0],
        "advantages": [0.0, 1.5, 1.5, 0.0],
    }
    assert recording.sequences()[0].turns[0].end == 4


def test_rewards_may_be_given_for_each_sequence(recording: Recording) -> None:
    assert [inputs(one)["advantages"][1] for one in recording.datums({1: 1.0, 2: -1.0}, abandoned=True)] == [1.0, -1.0]
    assert recording.datums({2: 1.0}) == []
    with pytest.raises(ValueError, match="the reward is nan"):
        recording.datums(math.nan)


def test_the_baseline_of_a_group_is_its_mean_and_equal_rewards_give_no_data(recording: Recording) -> None:
    data = group_datums([(recording, 1.0), (recording, 0.0)])
    assert [inputs(datum)["advantages"][1] for datum in data] == [0.5, -0.5]
    assert group_datums([(recording, 1.0), (recording, 1.0)]) == []


def test_a_refusal_is_reported_in_the_words_of_the_server() -> None:
    assert isinstance(module._explained(404, {"detail": "POST /api/v1/recordings: Not Found."}), NotOffered)
    refused = module._explained(404, {"detail": "you have no recording 'rec-1'"})
    assert isinstance(refused, RecordingRefused)
    assert module._explained(500, {"detail": "the store is read-only"}) is None
