"""The time a server may be unhealthy."""

from __future__ import annotations

import pytest
from tinsmith_trainer.sampling.token_server.server_process import ILL_SECONDS, PERIOD_SECONDS, until_ill


class Patient:
    """A server with its own clock. The test sets its health, and it answers slowly."""

    def __init__(self, answers: list[bool], seconds: float) -> None:
        self.answers = answers
        self.seconds = seconds
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def is_healthy(self) -> bool:
        self.now += self.seconds
        return self.answers.pop(0)


@pytest.mark.parametrize(("seconds", "questions"), [(0.0, 6), (2.0, 5), (30.0, 2)])
async def test_a_server_is_given_up_when_it_was_ill_for_a_minute_however_long_its_answers_take(
    seconds: float, questions: int
) -> None:
    patient, noted = Patient([False] * 10, seconds), list[float]()
    await until_ill(patient.is_healthy, lambda: patient.now, patient.sleep, noted.append)
    assert noted[-1] == patient.now
    assert len(patient.answers) == 10 - questions
    assert ILL_SECONDS <= patient.now < ILL_SECONDS + PERIOD_SECONDS + seconds
