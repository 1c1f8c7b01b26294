"""No part of a request is left out because the worker is of an earlier release than its server."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from support.worker.messages import with_a_later_field
from tinsmith_rpc import wire_pb2, worker_pb2
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.codec import decode_sample
from tinsmith_trainer.wire.unknown_fields import unknown_fields_of, unknown_fields_of_operation

LORA = worker_pb2.LoraConfig(rank=4)
SAVE = worker_pb2.SaveWeights(name="a", user_metadata={"by": "hand"})
DATUM = wire_pb2.Datum(loss_fn_inputs={"weights": wire_pb2.Tensor(shape=[1])})


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.SampleRequest(stop_strings=["."], target_prompt_logprobs=wire_pb2.Tensor(shape=[2, 1])),
        worker_pb2.CreateModel(lora=LORA),
        SAVE,
        wire_pb2.ForwardBackwardRequest(data=[DATUM]),
    ],
)
def test_known_fields_are_read(message: Message) -> None:
    assert unknown_fields_of(message) == ""


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (with_a_later_field(SAVE, 126), "field 126 of SaveWeights"),
        (worker_pb2.CreateModel(lora=with_a_later_field(LORA, 99)), "field 99 of LoraConfig"),
        (wire_pb2.ForwardBackwardRequest(data=[DATUM, with_a_later_field(DATUM, 77)]), "field 77 of Datum"),
    ],
    ids=["at the top", "inside", "in a list"],
)
def test_an_unknown_field_is_named_at_every_depth(message: Message, field: str) -> None:
    assert f"This worker's release does not know {field}, by which" in unknown_fields_of(message)


def test_all_fields_are_named_in_one_sentence() -> None:
    request = with_a_later_field(with_a_later_field(SAVE, 126), 127)
    assert "does not know field 126 of SaveWeights, field 127 of SaveWeights, by which" in unknown_fields_of(request)


def test_a_release_with_unknown_fields_ends_its_model() -> None:
    payload = with_a_later_field(worker_pb2.ReleaseModel(), 126).SerializeToString()
    assert unknown_fields_of_operation(worker_pb2.RELEASE_MODEL, payload) == ""


def test_a_sample_that_asks_for_more_fails_as_the_servers_business() -> None:
    with pytest.raises(ServerError, match="does not know field 126 of SampleRequest"):
        decode_sample(with_a_later_field(worker_pb2.SampleRequest(num_samples=1), 126))
