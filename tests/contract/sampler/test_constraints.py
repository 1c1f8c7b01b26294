"""The promises of every sampler about constraints, biases and penalties."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.sampler.jobs import ask, ask_all, bits, full_logprobs, job, plain_model, prompt_of
from tinsmith_trainer.sampling.base import DrawnToken, SampleJob, Sampler
from tinsmith_trainer.sampling.constraints.constraint import Constraint, JsonText, RegexText, TaggedTexts
from tinsmith_trainer.sampling.language import Tag
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import EVERY_TOKEN_SERVER, IN_PLACE_OF_A_GPU

PROMPT = prompt_of(20)
TOLERANCE = 1e-4
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_PERSON = Constraint(JsonText(json.dumps(PERSON)))
CALL = Tag('<tool_call>\n{"name": "add", "arguments": ', json.dumps(PERSON), "}\n</tool_call>")

every_sampler = pytest.mark.parametrize(
    "sampler", ["builtin-fast", *IN_PLACE_OF_A_GPU, *EVERY_TOKEN_SERVER], indirect=True
)


def constrained(sampler: Sampler, model: TorchModel, constraint: Constraint = AS_PERSON, **params: Any) -> SampleJob:
    ends = {"max_tokens": 60, "stop_tokens": tuple(model.eos_token_ids)}
    return sampler.prepared(job(PROMPT, **(ends | params), constraint=constraint))


def texts(model: TorchModel, outcome: Any) -> list[str]:
    decoded = [model.tokenizer.decode(one.tokens.tolist()) for one in outcome.sequences]
    return [text.removesuffix(model.tokenizer.eos_token) for text in decoded]


@every_sampler
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sequence_fits_its_schema_and_ends_with_it(sampler: Sampler, model: TorchModel, temperature: float) -> None:
    outcome = ask(sampler, constrained(sampler, model, temperature=temperature, seed=3, num_samples=4))
    for text, sequence in zip(texts(model, outcome), outcome.sequences, strict=True):
        read = json.loads(text)
        assert (read["name"] in ("Ada", "Bob"), 0 <= read["age"] <= 99, sequence.stopped) == (True, True, True)


@every_sampler
def test_logprobs_of_a_constrained_sequence_say_whether_they_are_before_the_mask(
    sampler: Sampler, model: TorchModel
) -> None:
    asked = constrained(sampler, model)
    outcome = ask(sampler, asked)
    tokens = outcome.sequences[0].tokens
    before = full_logprobs(plain_model(model), [*PROMPT, *tokens])[len(PROMPT) - 1 :]
    agrees = np.allclose(outcome.sequences[0].logprobs, before, atol=TOLERANCE)
    assert agrees is not outcome.masked_logprobs
    heard: list[DrawnToken] = []
    told = ask(sampler, replace(asked, drawn=lambda _, token: heard.append(token)))
    assert {token.masked_logprobs for token in heard} <= {told.masked_logprobs}


@every_sampler
def test_max_tokens_end_a_sequence_within_its_grammar(sampler: Sampler, model: TorchModel) -> None:
    sequence = ask(sampler, constrained(sampler, model, max_tokens=3)).sequences[0]
    assert (len(sequence.tokens), sequence.stopped) == (3, False)


@every_sampler
@pytest.mark.parametrize(
    ("constraint", "begin", "end"),
    [
        (RegexText("[a-c]{3}/x"), "", "/x"),
        (TaggedTexts((CALL,), single=True), "<tool_call>\n{", "}\n</tool_call>"),
    ],
    ids=["regex", "tool call"],
)
def test_a_sequence_fits_a_regular_expression_and_the_tags_of_calls(
    sampler: Sampler, model: TorchModel, constraint: Any, begin: str, end: str
) -> None:
    (text,) = texts(model, ask(sampler, constrained(sampler, model, Constraint(constraint))))
    assert text.startswith(begin)
    assert text.endswith(end)


@every_sampler
def test_biases_and_penalties_choose_the_tokens(sampler: Sampler) -> None:
    def greedy(**params: Any) -> list[int]:
        asked = job(PROMPT, temperature=0.0, max_tokens=6, **params)
        tokens: list[int] = ask(sampler, asked).sequences[0].tokens.tolist()
        return tokens

    plain, other = greedy(), int(PROMPT[0])
    assert greedy(logit_bias=((other, 100.0),)) == [other] * 6
    assert greedy(logit_bias=((plain[0], -100.0),))[0] != plain[0]
    both = ((other, 100.0), (other + 1, 99.0))
    assert greedy(logit_bias=both, presence_penalty=2.0)[:2] == [other, other + 1]
    three = ((other, 100.0), (other + 1, 97.0))
    assert greedy(logit_bias=three, frequency_penalty=2.0)[:3] == [other, other, other + 1]


@pytest.mark.parametrize("sampler", ["builtin"], indirect=True)
def test_a_masked_sequence_changes_no_sample_beside_it(sampler: Sampler, model: TorchModel) -> None:
    plain = [job(prompt_of(20, seed), max_tokens=12, seed=seed) for seed in range(4)]
    masked = constrained(sampler, model, frequency_penalty=1.0, seed=5)
    alone = [bits(ask(sampler, one)) for one in plain]
    together = ask_all(sampler, [plain[0], masked, *plain[1:3], replace(masked, request_id="again"), plain[3]])
    assert [bits(together[place]) for place in (0, 2, 3, 5)] == alone
    assert bits(together[1]) == bits(together[4])
