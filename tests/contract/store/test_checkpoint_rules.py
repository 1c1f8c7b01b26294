"""Any order of saves, replays and deletions, against a dictionary that follows the rules by hand."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.server.empty_stores import with_schema
from support.server.store_records import NOW, a_checkpoint
from tinsmith_server.store.records import Checkpoint
from tinsmith_server.store.store import open_store
from typing_extensions import override

pytestmark = pytest.mark.core

RUN = "session-1:train:0"
NAMES = st.sampled_from(["a", "b"])
VERSIONS = st.tuples(st.integers(0, 3), st.integers(0, 6))


class CheckpointRules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        url = with_schema(f"sqlite:///{Path(self.directory.name)}/store.db")
        self.store = self.loop.run_until_complete(open_store(url))
        self.newest: dict[str, tuple[int, int]] = {}
        self.present: dict[str, Checkpoint] = {}

    @override
    def teardown(self) -> None:
        self.loop.run_until_complete(self.store.close())
        self.loop.close()
        self.directory.cleanup()

    @rule(name=NAMES, version=VERSIONS)
    def save(self, name: str, version: tuple[int, int]) -> None:
        checkpoint = a_checkpoint(name, epoch=version[0], event_id=version[1])
        replaced = self.loop.run_until_complete(self.store.put_checkpoint(checkpoint))
        if version <= self.newest.get(name, (-1, -1)):
            assert replaced is None
            return
        assert replaced == self.present.get(name)
        self.newest[name], self.present[name] = version, checkpoint

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        deleted = self.loop.run_until_complete(self.store.delete_checkpoint(RUN, "training", name, NOW))
        assert deleted == self.present.pop(name, None)

    @rule(name=NAMES, public=st.booleans())
    def publish(self, name: str, public: bool) -> None:
        self.loop.run_until_complete(self.store.set_checkpoint_public(RUN, "training", name, public))
        if name in self.present:
            self.present[name] = replace(self.present[name], public=public)

    @invariant()
    def the_store_shows_what_the_rules_say(self) -> None:
        found = self.loop.run_until_complete(self.store.checkpoints_of_run(RUN))
        assert {checkpoint.name: checkpoint for checkpoint in found} == self.present


CheckpointRules.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_saves_replays_and_deletions_in_any_order_follow_the_rules = CheckpointRules.TestCase
