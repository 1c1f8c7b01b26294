from __future__ import annotations

import pytest
from tinsmith_operator.api.base import parse_quantity


@pytest.mark.parametrize(
    ("one", "other"), [("1", 1), ("500m", "0.5"), ("1Gi", "1024Mi"), ("1k", "1e3"), ("2E", "2000P"), ("1000u", "1m")]
)
def test_one_amount_can_be_written_in_several_ways(one: str, other: int | str) -> None:
    assert parse_quantity(one) == parse_quantity(other)


def test_binary_and_decimal_suffixes_differ() -> None:
    assert parse_quantity("1Gi") > parse_quantity("1G")


@pytest.mark.parametrize("text", ["", "Gi", ".", "1.2.3", "1 Gi", "ten", "1Zi", "1e999999999", "1e" + "9" * 5000])
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
