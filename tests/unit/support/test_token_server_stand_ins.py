"""The stand-ins for vLLM and SGLang know what is sent to them, and what is taken for granted says where from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.token_server import sglang, vllm
from tinsmith_trainer.sampling.token_server.base import GenerationRequest
from tinsmith_trainer.sampling.token_server.sglang import sglang_request
from tinsmith_trainer.sampling.token_server.vllm import STREAMED, vllm_request

_FILE = Path(vllm.__file__).with_name("assumptions.toml")
ASSUMPTIONS = [each for server in tomllib.loads(_FILE.read_text()).values() for each in server]
EVERYTHING = GenerationRequest(
    adapter="version",
    prompt=np.array([1, 2], np.int32),
    max_tokens=1,
    temperature=1.0,
    top_k=-1,
    top_p=1.0,
    seed=1,
    stop_token_ids=(3,),
    stop_strings=("end",),
    scored_from=1,
    topk_prompt=2,
    candidates=(4,),
    cache_salt="tenant",
    logit_bias=((5, 1.0),),
    grammar="start: /a/",
)


def test_every_field_of_a_request_is_known_and_no_other() -> None:
    """The real servers ignore what they do not know."""
    assert vllm_request(EVERYTHING).keys() | STREAMED.keys() == vllm.REQUEST_FIELDS
    request: Any = sglang_request(EVERYTHING)
    assert request.keys() == sglang.REQUEST_FIELDS
    assert request["sampling_params"].keys() == sglang.SAMPLING_FIELDS


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda assumption: assumption["what"][:50])
def test_an_assumption_says_where_it_is_written(assumption: dict[str, str]) -> None:
    if assumption["ground"] == "documented":
        assert re.match(r"https://|sgl-project/sglang: docs/", assumption["where"])
    if assumption["ground"] == "read in the source":
        assert re.match(r"[\w-]+/[\w-]+: \S+\.py", assumption["where"])
