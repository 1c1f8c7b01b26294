"""The tokens of an example, and those of them that are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tinsmith.training.errors import BadConfig, BadData
from tinsmith.training.runs.config import SftConfig
from tinsmith.training.runs.data import Examples, datum_of, prepare
from tinsmith.training.runs.json_lines import BadExample, Completion, Conversation, Located, SftExample, Text
from tinsmith.training.runs.rendering import OfCookbook, Rendering, Tokens, TrainOn, choose_rendering
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from transformers import AutoTokenizer

pytestmark = pytest.mark.pytorch

TALK = Conversation(
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "2"},
    ]
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("model")))


def learned(
    rendering: Rendering, tokenizer: Any, example: SftExample, train_on: TrainOn = "all_assistant"
) -> list[str]:
    """Return the trained runs of tokens, as text."""
    [rendered] = rendering.sequences(example, train_on)
    runs: list[list[int]] = []
    for place, (token, is_learned) in enumerate(zip(rendered.tokens, rendered.learned, strict=True)):
        if is_learned and (place == 0 or not rendered.learned[place - 1]):
            runs.append([])
        if is_learned:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_another_model_has_its_chat_template_and_one_without_is_plain(tokenizer: Any) -> None:
    assert choose_rendering("auto", tokenizer, "demo/tiny").name == "chat_template"
    tokenizer_without = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer_without.chat_template = None
    assert choose_rendering("auto", tokenizer_without, "demo/tiny").name == "plain"
    with pytest.raises(BadConfig, match="the tokenizer of demo/tiny has none: use plain"):
        choose_rendering("chat_template", tokenizer_without, "demo/tiny")


def test_a_chat_template_learns_answers_with_their_ends(tokenizer: Any) -> None:
    rendering = choose_rendering("chat_template", tokenizer, "demo/tiny")
    text = tokenizer.apply_chat_template(TALK.messages, tokenize=False)
    assert tokenizer.decode(rendering.render(TALK).tokens) == text
    assert learned(rendering, tokenizer, TALK) == ["1<|im_end|>\n", "2<|im_end|>\n"]
    assert learned(rendering, tokenizer, TALK, "last_assistant") == ["2<|im_end|>\n"]
    assert learned(rendering, tokenizer, Completion("One", "1")) == ["1<|im_end|>\n"]


def test_a_template_that_changes_earlier_answers_is_reported(tokenizer: Any) -> None:
    forgetful = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    forgetful.chat_template = (
        "{% for message in messages %}{{ message.role }} "
        "{{ message.content if loop.last or message.role == 'user' else '…' }}\n{% endfor %}"
        "{{ 'assistant ' if add_generation_prompt }}"
    )
    rendering = choose_rendering("chat_template", forgetful, "demo/tiny")
    with pytest.raises(BadExample, match=r"the answer in message 1 otherwise when .* more follows: use"):
        rendering.sequences(TALK, "all_assistant")
    assert learned(rendering, forgetful, TALK, "last_assistant") == ["2\n"]


def test_plain_text_is_learned_to_its_end_and_of_a_completion_only_what_completes(tokenizer: Any) -> None:
    rendering = choose_rendering("plain", tokenizer, "demo/tiny")
    assert learned(rendering, tokenizer, Text("abc")) == [f"abc{tokenizer.eos_token}"]
    assert learned(rendering, tokenizer, Completion("One", " 1")) == [f" 1{tokenizer.eos_token}"]
    assert tokenizer.decode(rendering.render(TALK).tokens).startswith("User: One\n\nAssistant: 1\n\nUser:")


def test_a_renderer_of_the_cookbook_learns_the_answer(tokenizer: Any) -> None:
    rendering = choose_rendering("qwen3", tokenizer, "demo/tiny")
    assert learned(rendering, tokenizer, Completion("One", "1"))[-1].endswith("1<|im_end|>")


def test_each_answer_is_learned_as_it_is_sampled(tokenizer: Any) -> None:
    """Qwen3's renderer writes thoughts, even empty ones, only into the last answer."""
    rendering = choose_rendering("qwen3", tokenizer, "demo/tiny")
    assert isinstance(rendering, OfCookbook)
    first, second = rendering.sequences(TALK, "all_assistant")
    for sequence, place in ((first, 1), (second, 3)):
        prompt = rendering.renderer.build_generation_prompt(TALK.messages[:place]).to_ints()  # type: ignore[arg-type]
        assert sequence.tokens[: len(prompt)] == prompt
        assert sequence.learned == [False] * len(prompt) + [True] * (len(sequence.tokens) - len(prompt))
        answer = tokenizer.decode(sequence.tokens[len(prompt) :])
        assert answer == f"<think>\n\n</think>\n\n{TALK.messages[place]['content']}<|im_end|>"
    assert rendering.sequences(TALK, "last_assistant") == (second,)


def test_a_renderer_that_writes_answers_as_they_are_sampled_has_one_sequence(tokenizer: Any) -> None:
    assert len(learned(choose_rendering("plain", tokenizer, "demo/tiny"), tokenizer, TALK)) == 2


def test_a_datum_predicts_each_token_from_those_before_it() -> None:
    datum = datum_of(Tokens([5, 6, 7], [False, True, True]), 0.5)
    assert datum.model_input.to_ints() == [5, 6]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.5, 0.5]


def config(**given: Any) -> SftConfig:
    return SftConfig(model="demo/tiny", data=Path("a.jsonl"), **given)


def of_lengths(*lengths: int) -> Examples[int]:
    return Examples([Located(length, f"a.jsonl:{length}") for length in lengths], [], "")


def render_length(length: int) -> tuple[Tokens, ...]:
    """Return an example whose last two tokens are trained on."""
    return (Tokens(list(range(length)), [False] * (length - 2) + [True] * 2),)


def test_examples_that_are_too_long_are_dropped_and_counted() -> None:
    prepared = prepare(config(max_length=4), of_lengths(3, 4, 5, 9), render_length)
    assert [len(one.tokens) for (one,) in prepared.train] == [3, 4]
    assert prepared.described() == {"examples": 2, "held_out": 0, "dropped": 2, "truncated": 0, "tokens": 7}


def test_answers_that_are_too_long_are_dropped_but_a_comparison_is_dropped_whole() -> None:
    def render(length: int) -> tuple[Tokens, ...]:
        return (*render_length(length), *render_length(length + 4))

    truncated = config(max_length=4, too_long="truncate")
    [[left]] = prepare(truncated, of_lengths(4), render).train
    assert left == render_length(4)[0]
    with pytest.raises(BadData, match="no example"):
        prepare(truncated, of_lengths(4), render, are_compared=True)


def test_an_example_that_is_too_long_is_refused_on_request() -> None:
    with pytest.raises(BadData, match=r"a.jsonl:5: 5 tokens, more than max_length \(4\)"):
        prepare(config(max_length=4, too_long="refuse"), of_lengths(3, 5), render_length)


def test_a_renderer_that_the_tokenizer_does_not_fit_is_refused(tokenizer: Any) -> None:
    with pytest.raises(BadConfig, match="renderer qwen99 does not fit the tokenizer of demo/tiny: "):
        choose_rendering("qwen99", tokenizer, "demo/tiny")
