"""Random orders of clients' requests, deaths and time, compared with the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.protocol.machine import ProtocolMachine

# `make test-protocol-model` runs ten thousand.
SEQUENCES = 40


@pytest.fixture
def machine() -> Iterator[type[ProtocolMachine]]:
    yield ProtocolMachine
    ProtocolMachine.discard()


def test_random_sequences_get_the_answers_of_the_reference(machine: type[ProtocolMachine]) -> None:
    drawn = settings(
        max_examples=SEQUENCES, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=drawn)


def test_a_sample_is_cancelled_at_a_server_that_has_just_started(machine: type[ProtocolMachine]) -> None:
    """It has not spoken to the worker yet: no model's calls go there."""
    sequence = machine()
    sequence.first_model()
    sequence.unload(which=0)
    sequence.sample(seed=0, which=0)
    sequence.kill(what="server")
    sequence.with_a_sample(which=0, act="cancel")
    sequence.teardown()
