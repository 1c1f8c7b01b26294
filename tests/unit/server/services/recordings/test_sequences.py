"""Any agent's requests become sequences that contain each drawn token once, behind what the model read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_server.services.recordings.histories import Conversation, History, own_digests
from tinsmith_server.services.recordings.sequences import sequences_of
from tinsmith_server.store.records import RecordedTurn

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Message = dict[str, Any]


def said(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def packed(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Agent:
    """The recorded turns of requests, with one token for each message and one for each answer."""

    def __init__(self) -> None:
        self.turns: list[RecordedTurn] = []
        self._drawn = 1000

    def ask(self, messages: Sequence[Message], text: str = "yes", *, tools: str = "", reasoning: str = "") -> str:
        """Record an answer, and return the reason of its turn."""
        asked = Conversation.of(messages, tools, "")
        place = History(self.turns).place(asked)
        self._drawn += 1
        turn = RecordedTurn(
            recording_id="rec-1",
            number=len(self.turns) + 1,
            parent=place.parent,
            reason=place.reason,
            model_path="tiny",
            weights_digest="",
            finish_reason="stop",
            sampling={},
            started_at=NOW,
            ended_at=NOW,
            settings_digest=asked.settings,
            message_digests=own_digests(asked.digests_with(answer(text)), place),
            reasoning=reasoning.encode(),
            prompt_tokens=packed(*(len(message["content"]) for message in messages[place.covered :])),
            sampled_tokens=packed(self._drawn),
            logprobs=array("f", [-0.5]).tobytes(),
        )
        self.turns.append(turn)
        return place.reason


def call(identity: str, **arguments: int) -> Message:
    return {"id": identity, "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_an_echo_may_lose_its_reasoning_and_its_identities_and_a_change_may_not_pass() -> None:
    agent = Agent()
    agent.ask([said("hi")], "So", reasoning="Hm")
    history = History(agent.turns)

    def reason(echo: Message) -> str:
        return history.place(Conversation.of([said("hi"), echo, said("more")], "", "")).reason

    assert reason(answer(" So\n", name="solver")) == reason(answer("So", reasoning_content="Hm\n")) == "extends"
    assert reason(answer("So", reasoning_content="Ha")) == reason(answer("So!")) == "history_changed"
    assert reason(answer("So", tool_calls=[call("x", a=1)])) == "history_changed"
    conversations = [
        Conversation.of([answer("", tool_calls=[call(identity, **arguments)])], "", "")
        for identity, arguments in (("x", {"a": 1, "b": 2}), ("y", {"b": 2, "a": 1}))
    ]
    assert conversations[0].digests == conversations[1].digests


def test_the_recorded_reasoning_of_every_answer_returns_before_rendering() -> None:
    agent = Agent()
    agent.ask([said("a")], "b", reasoning="one")
    conversation = [said("a"), answer("b"), said("c")]
    agent.ask(conversation, "d", reasoning="two")
    later = [*conversation, answer("d"), said("e")]
    history = History(agent.turns)
    filled = history.with_reasoning(history.place(Conversation.of(later, "", "")), later)
    assert [message.get("reasoning_content") for message in filled] == [None, "one", None, "two", None]


STEPS = st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["x", "yy"]), st.sampled_from(["", "[]"])), max_size=12)


@given(STEPS)
def test_each_drawn_token_has_mask_1_in_one_sequence_that_has_what_the_model_read(
    steps: list[tuple[int, str, str]],
) -> None:
    """An agent asks, continues any earlier conversation, repeats it or changes its tools."""
    agent, conversations = Agent(), [[said("x")]]
    for chosen, text, tools in steps:
        conversation = conversations[chosen % len(conversations)]
        agent.ask(conversation, text, tools=tools)
        conversations.append([*conversation, answer(text), said(text)])
    found = list(sequences_of(agent.turns))
    trained = [token for one in found for token, mask in zip(one.tokens, one.mask, strict=True) if mask]
    assert sorted(trained) == [1000 + turn.number for turn in agent.turns]
    history = History(agent.turns)
    for one in found:
        assert len(one.tokens) == len(one.logprobs) == len(one.mask)
        for segment in one.segments:
            assert packed(*one.tokens[: segment.end]) == history.tokens(segment.turn)
            assert one.logprobs[segment.start : segment.end] == [-0.5]
    assert found == [] or not all(one.abandoned for one in found)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 2), st.integers(1, 2)), max_size=6), st.data())
def test_a_completion_extends_the_longest_sequence_that_its_prompt_begins_with(
    grown: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    agent = Agent()
    agent.ask([said("q")])
    template = agent.turns[0]
    turns = [replace(template, number=0, parent=None, prompt_tokens=packed(1), sampled_tokens=packed(2))]
    for above, prompt, drawn in grown:
        own = {"prompt_tokens": packed(prompt), "sampled_tokens": packed(drawn)}
        turns.append(replace(template, number=len(turns), parent=above % len(turns), **own))
    history = History(turns)
    asked = packed(*data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=8)))
    begun = [
        (len(history.tokens(turn.number)), turn.number)
        for turn in turns
        if asked.startswith(history.tokens(turn.number))
    ]
    assert history.place_of_tokens(asked).parent == (max(begun)[1] if begun else None)
