"""Graphs from untrusted authors are parsed as data, completely, or refused with one message."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.graphs import node, ref, written
from tinsmith_rpc import custom_losses
from tinsmith_rpc.custom_losses import (
    MAX_ID_CHARACTERS,
    MAX_JSON_BYTES,
    MAX_NODES,
    CustomLossInvalid,
    is_loss_id,
    loss_id_of,
    loss_of,
    read_custom_loss,
)

SUM = node("loss", "sum", ref("logprobs"), op="call_method")
SOUND = written(SUM)


def in_letters(content: bytes) -> str:
    return "loss1-" + base64.urlsafe_b64encode(zlib.compress(content)).decode()


def changed(**fields: Any) -> dict[str, Any]:
    """Return the valid graph with a changed call."""
    content = copy.deepcopy(SOUND)
    content["graph"]["nodes"][1] |= fields
    return content


def test_a_packed_loss_is_read_and_packed_identically() -> None:
    loss_id = loss_id_of(SOUND)
    assert loss_of(loss_id) == read_custom_loss(SOUND)
    assert is_loss_id(loss_id)
    assert loss_id_of(copy.deepcopy(SOUND)) == loss_id


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (written(node("loss", "torch.load", "/etc/passwd")), r"'torch.load', which this server does not run"),
        (written(node("loss", "builtins.eval", "1")), "does not run"),
        (written(node("loss", "os.system", "true")), "does not run"),
        (written(node("loss", "torch.rand_like", ref("logprobs"))), "does not run"),
        (written(node("loss", "add_", ref("logprobs"), 1, op="call_method")), "does not run"),
        (written(node("loss", "sum", op="call_method")), "a method of nothing"),
        (written(node("loss", "m", ref("logprobs"), op="call_module")), "functions and methods can be called"),
        (written(node("loss", "t", op="get_attr")), "functions and methods can be called"),
        (changed(args=[ref("loss")]), "refers to 'loss', which is no earlier node"),
        (written(node("loss", "torch.neg", ref("later")), node("later", "torch.neg", ref("loss"))), "no earlier node"),
        (written(SUM, SUM), "two nodes are named 'loss'"),
        (written(SUM, loss="gone"), "'gone', which is no earlier node"),
        (written(SUM, metrics={"loss:sum": "loss"}), "named custom/<name>:sum"),
        (changed(kwargs={"out": ref("logprobs")}), "the argument 'out'"),
        (changed(args=[ref("logprobs"), 2**80]), "a whole number beyond"),
        (changed(args=[ref("logprobs"), "x" * 129]), "a text of 129 characters"),
        (changed(args=[ref("logprobs"), {"dtype": "complex64"}]), "the dtype 'complex64'"),
        (changed(args=[ref("logprobs"), {"layout": "sparse_coo"}]), "the layout 'sparse_coo'"),
        (changed(args=[ref("logprobs"), {"slice": [1]}]), "a slice of 1 parts"),
        (changed(args=[ref("logprobs"), {"code": "1"}]), "the kind 'code'"),
        (changed(args=[ref("logprobs"), [1] * 5000]), "more than 4096"),
        (changed(args=[ref("logprobs"), [[[[[[[1]]]]]]]]), "6 deep"),
        (SOUND | {"inputs": []}, "1 to 16"),
        (SOUND | {"inputs": [{"name": "logprobs", "rank": 0}]}, "of rank 1 or 2"),
        (SOUND | {"inputs": [{"name": "logprobs", "rank": 3}]}, "rank 0, 1 or 2"),
        (SOUND | {"inputs": [{"name": "__class__.x", "rank": 1}]}, "small letters"),
        (SOUND | {"inputs": [{"name": name, "rank": 1} for name in ("logprobs", "mask")]}, "placeholder"),
        (SOUND | {"graph": {"format": 2, "nodes": []}}, "format 1"),
        (SOUND | {"graph": {"format": 1, "nodes": SOUND["graph"]["nodes"][:-1]}}, "end with its output"),
        (SOUND | {"name": "x\n"}, "printable"),
        (written(*(node(f"n{i}", "torch.neg", ref("logprobs")) for i in range(MAX_NODES)), loss="n0"), "are the most"),
    ],
)
def test_a_loss_with_other_calls_is_refused_with_a_message(content: dict[str, Any], message: str) -> None:
    with pytest.raises(CustomLossInvalid, match=message):
        loss_id_of(content)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss1-",
        "loss1-%%%",
        "loss1-AAAA",
        "loss1-" + "A" * MAX_ID_CHARACTERS,
        in_letters(b"[" * 10_000),
        in_letters(b"[]"),
        in_letters(b"\xff"),
        in_letters(b'{"name":"' + b"x" * MAX_JSON_BYTES + b'"}'),
        in_letters(b" " * 10_000_000),
        in_letters(json.dumps(SOUND).encode())[:-8],
    ],
)
def test_an_id_that_was_not_given_out_is_refused_and_unpacks_no_more_than_its_bound(text: str) -> None:
    with pytest.raises(CustomLossInvalid):
        loss_of(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["ref", "tuple", "dict", "slice", "float", "dtype", "x"]), inner, max_size=2)
    ),
    max_leaves=12,
)
NODES = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["placeholder", "call_function", "call_method", "get_attr", "output"]) | JSON,
        "name": st.sampled_from(["logprobs", "loss", "a"]) | JSON,
        "target": st.sampled_from(["logprobs", "torch.exp", "sum", "getattr", "output"]) | JSON,
        "args": st.lists(JSON, max_size=3) | JSON,
        "kwargs": JSON,
    },
)


@given(st.lists(NODES, max_size=5), JSON, JSON)
def test_any_nodes_are_read_or_refused_and_nothing_else_comes_of_them(
    nodes: list[dict[str, Any]], name: object, inputs: object
) -> None:
    for content in (
        {"name": name, "inputs": inputs, "graph": {"format": 1, "nodes": nodes}},
        SOUND | {"graph": {"format": 1, "nodes": [*SOUND["graph"]["nodes"][:1], *nodes, SOUND["graph"]["nodes"][-1]]}},
    ):
        try:
            loss = read_custom_loss(content)
        except CustomLossInvalid:
            continue
        assert len(loss.calls) <= MAX_NODES
        assert all(call.target in custom_losses.FUNCTIONS | custom_losses.METHODS for call in loss.calls)


@given(st.binary(max_size=64))
def test_any_letters_are_refused_or_an_id(content: bytes) -> None:
    with pytest.raises(CustomLossInvalid):
        loss_of("loss1-" + base64.urlsafe_b64encode(content).decode())
