"""A training request's count against a rate of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from tinsmith_rpc import wire_pb2
from tinsmith_rpc.training_bodies import UNCOUNTED_IMAGE_TOKENS
from tinsmith_server.wire.head import trained_tokens


@pytest.mark.parametrize(("expected_tokens", "counted"), [(64, 64), (0, UNCOUNTED_IMAGE_TOKENS)])
def test_an_image_counts_whether_its_sender_counted_it_or_not(expected_tokens: int, counted: int) -> None:
    request = wire_pb2.ForwardBackwardRequest()
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(5, dtype=np.int32).tobytes()
    image = datum.model_input.add().image
    image.data = b"png"
    if expected_tokens:
        image.expected_tokens = expected_tokens
    assert trained_tokens(request.SerializeToString()) == 5 + counted
