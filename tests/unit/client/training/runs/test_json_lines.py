"""Examples in JSONL: valid lines, and the errors of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinsmith.training.errors import BadData
from tinsmith.training.runs.json_lines import (
    AnsweredPrompt,
    BadExample,
    Completion,
    Conversation,
    Preference,
    Text,
    digest_of_files,
    parse_answered,
    parse_dpo,
    parse_sft,
    read_examples,
)

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Good day"}


def test_three_forms_are_examples_of_supervised_training() -> None:
    assert parse_sft({"messages": [USER, ANSWER]}) == Conversation([USER, ANSWER])
    assert parse_sft({"prompt": "", "completion": "b"}) == Completion("", "b")
    assert parse_sft({"text": "a"}) == Text("a")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"question": 1, "answer": 2},
            "needs messages, prompt and completion, or text; it has answer, question",
        ),
        ({}, "it has nothing"),
        ({"messages": []}, "messages must be a list of messages"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            r"messages\[0\] must have one of the roles system, user, assistant, tool",
        ),
        ({"messages": [USER]}, "the last message of messages has role user; it must be assistant"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, r"the content of messages\[0\] is not a string"),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [1]}]},
            r"messages\[1\] has tool_calls, which this command does not",
        ),
        ({"text": "a", "weight": 2}, "weight cannot be combined with text"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"text": 3}, "text is not a string"),
    ],
)
def test_the_error_of_an_example_is_reported(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadExample, match=message):
        parse_sft(record)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no rejected; it has chosen, prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        (
            {"prompt": "a", "chosen": [USER], "rejected": "b"},
            "chosen must be a string, or one message of the assistant",
        ),
    ],
)
def test_the_error_of_a_preference_is_reported(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadExample, match=message):
        parse_dpo(record)


def test_prompts_have_answers_that_are_words_or_numbers() -> None:
    assert parse_answered({"prompt": "a", "answer": 4}) == AnsweredPrompt("a", "4")
    assert parse_answered({"prompt": [USER], "answer": "b"}) == AnsweredPrompt([USER], "b")
    for record, message in (({"prompt": "a"}, "no answer"), ({"prompt": "a", "answer": True}, "a string or a number")):
        with pytest.raises(BadExample, match=message):
            parse_answered(record)


def test_every_bad_line_is_reported_with_its_file_and_number(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": }\n[1]\n{"text": 5}\n')
    with pytest.raises(BadData) as raised:
        read_examples(file, parse_sft)
    assert str(raised.value).splitlines() == [
        f"{file}:3: no JSON: Expecting value at column 10",
        f"{file}:4: not a JSON object",
        f"{file}:5: text is not a string",
    ]


def test_the_digest_covers_the_content_of_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(1))
    (tmp_path / "b").write_text(json.dumps(2))
    digests = {
        digest_of_files(files)
        for files in ([tmp_path / "a"], [tmp_path / "a", tmp_path / "b"], [tmp_path / "b", tmp_path / "a"])
    }
    assert len(digests) == 3
    assert digest_of_files([tmp_path / "a"]) == digest_of_files([tmp_path / "a"])


def test_a_preference_has_two_answers_as_strings_or_messages() -> None:
    preference = parse_dpo({"prompt": "a", "chosen": "b", "rejected": "c"})
    assert preference == Preference(Completion("a", "b"), Completion("a", "c"))
    other = {"role": "assistant", "content": "What?"}
    preference = parse_dpo({"prompt": [USER], "chosen": "Good day", "rejected": [other]})
    assert preference == Preference(Conversation([USER, ANSWER]), Conversation([USER, other]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"a\.jsonl cannot be read: No such file"),
        ("\n", r"a\.jsonl has no examples"),
        ("1\n" * 25, r"a\.jsonl:10: not a JSON object\nand 15 more lines$"),
    ],
    ids=["missing", "empty", "many bad lines"],
)
def test_a_file_without_usable_examples_is_reported(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "a.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadData, match=message):
        read_examples(file, parse_sft)
