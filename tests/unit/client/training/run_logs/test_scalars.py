"""What metrics may be made of."""

from __future__ import annotations

import json

import numpy as np
from tinsmith.training.run_logs.scalars import numbers_of, plain_metrics


def test_numbers_of_numpy_become_plain_ones_that_json_knows() -> None:
    given = {"a": np.float32(0.5), "b": np.int64(3), "c": np.array([[2.0]]), "d": np.bool_(True), "e": 1, "f": "word"}
    assert json.loads(json.dumps(plain_metrics(given))) == {"a": 0.5, "b": 3, "c": 2.0, "d": True, "e": 1, "f": "word"}


def test_what_is_no_single_value_becomes_words() -> None:
    assert plain_metrics({"a": [1, 2], "b": None, "c": np.array([1, 2])}) == {"a": "[1, 2]", "b": "None", "c": "[1 2]"}


def test_only_numbers_are_drawn() -> None:
    assert numbers_of({"a": 1, "b": "word", "c": True}) == {"a": 1.0, "c": 1.0}
