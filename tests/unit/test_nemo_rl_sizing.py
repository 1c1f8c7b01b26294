"""The sizing table's formula: right about what is known, and never more from less."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from nemo_rl_sizing import GIB, MODELS, RANKS, SLOT_BYTES, TOKENS, Layout, Sizes, smallest
from tinsmith_operator.api.base import parse_quantity
from tinsmith_trainer.engines.megatron.engine import SHARING_BYTES

ROOT = Path(__file__).parents[2]
DIVIDED = re.compile(r"^  engine: (nemo-rl|miles)$", re.MULTILINE)
EXAMPLES = [file for file in sorted(ROOT.glob("examples/session*.yaml")) if DIVIDED.search(file.read_text())]
BILLIONS = {  # as their publishers say
    "Qwen3-0.6B": 0.6,
    "Qwen3-8B": 8.2,
    "Llama-3.1-8B": 8.0,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Llama-3.1-70B": 70.6,
}


@pytest.mark.parametrize("sizes", MODELS, ids=lambda sizes: sizes.name)
def test_models_have_as_many_parameters_as_their_publishers_say(sizes: Sizes) -> None:
    assert round(sizes.parameters / 1e9, 1) == BILLIONS[sizes.name]


@given(
    sizes=st.sampled_from(MODELS),
    layout=st.builds(Layout, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4])),
    rank=st.integers(1, 512),
    tokens=st.integers(1, 200_000),
)
def test_more_of_anything_takes_more_of_each_gpu_and_more_tensor_ranks_less(
    sizes: Sizes, layout: Layout, rank: int, tokens: int
) -> None:
    used = layout.gpu_bytes(sizes, rank, tokens)
    assert layout.gpu_bytes(sizes, rank + 1, tokens) > used
    assert layout.gpu_bytes(sizes, rank, tokens + 1) > used
    assert replace(layout, tensor=layout.tensor * 2).gpu_bytes(sizes, rank, tokens) < used


@pytest.mark.parametrize(
    ("name", "rank", "gib"),
    [pytest.param("Qwen3-0.6B", 32, 1.5, id="eight small ones"), pytest.param("Qwen3-8B", 32, 4.0, id="the limit")],
)
def test_the_adapters_of_a_shared_forward_take_what_the_engine_lets_them_take(name: str, rank: int, gib: float) -> None:
    [sizes] = [sizes for sizes in MODELS if sizes.name == name]
    layout = Layout(1, 1)
    assert round(layout.sharing_bytes(sizes, rank) / GIB, 1) == gib
    assert layout.sharing_bytes(sizes, rank) == min(SHARING_BYTES, 8 * 2 * 4 * sizes.adapter_parameters(rank))


def test_a_copy_is_never_laid_out_as_the_workers_would_refuse_it() -> None:
    for sizes in MODELS:
        for rank in RANKS:
            for tokens in TOKENS:
                layout = smallest(sizes, rank, tokens)
                assert layout is not None
                assert sizes.kv_heads % layout.tensor == sizes.vocab % layout.tensor == rank % layout.tensor == 0
                assert not (sizes.tied and layout.pipeline > 1)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_the_examples_models_fit_where_the_examples_put_them(file: Path) -> None:
    """The formula puts them on 80 GiB of each GPU, with all slots in the memory of a node."""
    spec = yaml.safe_load(file.read_text())["spec"]
    [sizes] = [sizes for sizes in MODELS if sizes.name in spec["model"]["name"]]
    divided = spec["parallelism"]
    layout = Layout(divided["tensor"], divided.get("pipeline", 1))
    gpus_per_node = int(spec["resources"]["limits"]["nvidia.com/gpu"])
    assert divided.get("nodes", 1) * gpus_per_node % layout.gpus == 0
    assert layout.fits(sizes)
    rank = spec["adapters"]["maxRank"]
    assert layout.gpu_bytes(sizes, rank, spec["maxSequenceLength"]) < 72 * GIB
    slots = SLOT_BYTES * sizes.adapter_parameters(rank) * spec["adapters"]["slots"]
    assert slots * gpus_per_node / layout.gpus < int(parse_quantity(spec["resources"]["limits"]["memory"])) / 2
