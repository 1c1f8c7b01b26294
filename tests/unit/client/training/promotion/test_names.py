"""What a server's refusal of a promotion means."""

from __future__ import annotations

import pytest
from tinsmith.training.errors import NotOffered, PromotionRefused
from tinsmith.training.promotion.names import explained


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {"detail": "Not Found"}),
        (404, {"detail": "PUT /api/v1/promotions/prod: Not Found"}),
        (405, {"detail": "Method Not Allowed"}),
        (404, None),
        (404, "<html>"),
    ],
)
def test_a_server_that_does_not_know_the_call_does_not_offer_it(status: int, body: object) -> None:
    assert isinstance(explained(status, body), NotOffered)


@pytest.mark.parametrize(("status", "sentence"), [(404, "you have promoted nothing as prod"), (422, "prod is one")])
def test_a_server_that_has_names_says_what_is_wrong(status: int, sentence: str) -> None:
    error = explained(status, {"detail": sentence})
    assert isinstance(error, PromotionRefused)
    assert str(error) == sentence


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_other_failures_are_the_sdks(status: int) -> None:
    assert explained(status, {"detail": "later"}) is None
