"""Chat templates of several makers render only what follows recorded tokens, or say why they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from jinja2 import Environment
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.continuations import CannotExtend, Continuation, Message, Render, continuation

END, OTHER_END = 7, 8

CHATML = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

# Reasoning stays behind the last question only, and the last answer always has a block of it.
THINKING = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = ns.last + 1 -%}{%- endfor -%}
{%- set seen = namespace(questions=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set seen.questions = seen.questions + 1 -%}{%- endif -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' -%}
{%- set thought = m.reasoning_content or '' -%}
{%- set text = m.content -%}
{%- if '</think>' in text -%}
{%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}{%- set text = text.split('</think>')[-1] -%}
{%- endif -%}
{%- if seen.questions == ns.last and (loop.last or thought) -%}<think>{{ thought }}</think>{%- endif -%}
{{ text }}
{%- else -%}{{ m.content }}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

# An answer ends with the token that begins the next message.
NEXT_ROLE_ENDS = """\
{%- for m in messages -%}
<|{{ 'observation' if m.role == 'tool' else m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

# The tools are rendered before the last question.
MOVING_TOOLS = """\
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- for m in messages -%}
{%- if m.role == 'user' and loop.index0 == (questions | length - 1) * 2 -%}[TOOLS]{%- endif -%}
[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}
{%- endfor -%}"""

ASK: Message = {"role": "user", "content": "How much is 2 + 3?"}
MORE: Message = {"role": "user", "content": "And <|im_end|> in a text?"}
CALLS: Message = {
    "role": "assistant",
    "content": "So",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
}
RESULT: Message = {"role": "tool", "content": "5"}
SO: Message = {"role": "assistant", "content": "So"}
ENDS = {END: "<|im_end|>", 99: "<|endoftext|>"}
ROLE_ENDS = {END: "<|user|>", OTHER_END: "<|observation|>"}


def rendering(template: str) -> Render:
    compiled = Environment(autoescape=False).from_string(template)  # chat templates make no HTML

    def render(messages: Sequence[Message], begins_answer: bool) -> str:
        return compiled.render(messages=messages, add_generation_prompt=begins_answer)

    return render


def extended(
    template: str, *messages: Any, covered: int = 2, last: int = END, ends: dict[int, str] = ENDS
) -> Continuation:
    recorded = worker_pb2.RecordedTokens(messages=covered, last_token=last)
    return continuation(rendering(template), messages, recorded, ends)


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (CHATML, [ASK, SO, MORE], "\n<|im_start|>user\nAnd <|im_end|> in a text?<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, [ASK, CALLS, RESULT], "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, [ASK, SO], "\n<|im_start|>assistant\n"),
        (THINKING, [ASK, SO, MORE], "\n<|im_start|>user\nAnd <|im_end|> in a text?<|im_end|>\n<|im_start|>assistant\n"),
        (THINKING, [ASK, CALLS, RESULT], "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"),
    ],
    ids=["question", "tool result", "nothing new", "question after no reasoning", "tool result after no reasoning"],
)
def test_the_text_behind_an_answer_begins_with_the_end_that_was_drawn(
    template: str, messages: list[Message], text: str
) -> None:
    assert extended(template, *messages) == Continuation(f"<|im_end|>{text}", END, end_is_recorded=True)


@pytest.mark.parametrize("answer", [SO, CALLS], ids=["text", "call"])
def test_an_answer_that_was_cut_off_gets_the_end_of_the_template(answer: Message) -> None:
    found = extended(CHATML, ASK, answer, MORE, last=300)
    assert (found.end, found.end_is_recorded) == (END, False)
    assert found.text.startswith("<|im_end|>\n<|im_start|>user\n")


def test_an_end_that_begins_the_next_message_is_not_rendered_twice() -> None:
    found = extended(NEXT_ROLE_ENDS, ASK, CALLS, RESULT, last=OTHER_END, ends=ROLE_ENDS)
    assert found == Continuation("<|observation|>5<|assistant|>", OTHER_END, end_is_recorded=True)
    with pytest.raises(CannotExtend, match="ANSWER_NOT_CLOSED"):
        extended(NEXT_ROLE_ENDS, ASK, CALLS, RESULT, last=END, ends=ROLE_ENDS)


@pytest.mark.parametrize(
    ("template", "messages", "covered", "obstacle"),
    [
        (THINKING, [ASK, {**SO, "reasoning_content": "Hm"}, MORE], 2, "REASONING_REMOVED"),
        (THINKING, [ASK, {**SO, "content": "<think>Hm</think>So"}, MORE], 2, "REASONING_REMOVED"),
        (THINKING, [ASK, {**CALLS, "reasoning_content": "Hm"}, RESULT, SO, MORE], 4, "HISTORY_REWRITTEN"),
        (CHATML, [ASK, {**SO, "reasoning_content": "Hm"}, MORE], 2, "REASONING_REMOVED"),
        (MOVING_TOOLS, [ASK, SO, MORE], 2, "HISTORY_REWRITTEN"),
        (CHATML.replace("<|im_end|>", ""), [ASK, SO, RESULT], 2, "ANSWER_NOT_CLOSED"),
    ],
    ids=["field", "in the content", "of an earlier answer", "unknown to the template", "tools move", "no end"],
)
def test_a_template_that_changes_what_was_recorded_cannot_extend_it(
    template: str, messages: list[Message], covered: int, obstacle: str
) -> None:
    with pytest.raises(CannotExtend, match=obstacle):
        extended(template, *messages, covered=covered)


def test_reasoning_that_the_template_keeps_between_tool_calls_is_extended() -> None:
    thoughtful = {**CALLS, "reasoning_content": "Hm"}
    found = extended(THINKING, ASK, thoughtful, RESULT, thoughtful, RESULT, covered=4)
    assert found.text == "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


def test_recorded_messages_must_end_with_an_answer() -> None:
    for covered in (0, 1, 3, 4):
        with pytest.raises(UserError, match="do not end with an answer"):
            extended(CHATML, ASK, SO, MORE, covered=covered)
