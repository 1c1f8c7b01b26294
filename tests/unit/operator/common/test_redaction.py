"""A container's last words are quoted only when they can be, and never with a key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.common.observed import SnapshotAnswer
from tinsmith_operator.common.redaction import LONGEST_LAST_WORDS, redacted_line, without_keys

PEM = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIBkgsecret\nAwEHoUQDQgAE\n-----END EC PRIVATE KEY-----"
KEYS = {
    "ours": ("no such tenant: tml-AbCdEfGhIjKlMnOp", "AbCdEf"),
    "of the hub": ("401 for hf_AbCdEfGhIjKlMnOpQrSt at huggingface.co", "AbCdEf"),
    "of a bucket": ("InvalidAccessKeyId AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
    "a session's of a bucket": ("ASIAIOSFODNN7EXAMPLE expired", "IOSFODNN7"),
    "a bearer": ("Authorization: Bearer abc.def-ghi", "abc.def"),
    "a bearer alone": ("sent 'bearer abc.def-ghi'", "abc.def"),
    "basic": ("authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    "a web token": ("got eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "eyJhbGci"),
    "a PEM": (f"cannot load {PEM}", "MHcCAQ"),
    "a PEM that is cut off": (f"cannot load {PEM[:50]}", "MHcCAQ"),
    "a password": ("password=hunter2 refused", "hunter2"),
    "a password in JSON": ('{"password": "hunter2"}', "hunter2"),
    "a variable": ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG is wrong", "wJalrXUtnFEMI"),
    "another variable": ("WANDB_API_KEY: 0123456789abcdef", "0123456789abcdef"),
    "in a URL": ("postgresql://tinsmith:hunter2@db:5432/tinsmith", "hunter2"),
    "of a forge": ("ghp_AbCdEfGhIjKlMnOpQrStUv", "AbCdEf"),
}


@pytest.mark.parametrize(("words", "key"), KEYS.values(), ids=KEYS.keys())
def test_text_that_looks_like_a_key_is_redacted(words: str, key: str) -> None:
    assert key not in without_keys(words)
    assert "[hidden]" in redacted_line(words)


def test_a_key_is_hidden_before_the_words_are_cut() -> None:
    words = "x" * (LONGEST_LAST_WORDS - 10) + " password=hunter2-and-more"
    assert "hunt" not in redacted_line(words)


@pytest.mark.parametrize(
    "words",
    [
        "No model in /models/qwen. Put one there",
        "The model has sha256:0123456789abcdef, and adapters were trained on sha256:fedcba9876543210",
        "CUDA out of memory: 1.5 GiB of 80 GiB are free",
        "tokenizer.json is not there",
    ],
)
def test_text_that_is_not_a_key_stays_unchanged(words: str) -> None:
    assert redacted_line(words) == words


def test_words_are_one_short_line_of_text() -> None:
    said = redacted_line("a\n\tb\x1b[31m\x00\u202ec " + "d" * 5000)
    assert said.startswith("a b\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}c ddd")
    assert len(said) == LONGEST_LAST_WORDS
    assert said.isprintable()


HOSTILE = "c3VwZXItc2VjcmV0"
"""Encoded: no list of patterns knows it."""


def a_world(image: str | None, *allowed: str) -> World:
    world = World(session_manifest(**({"pod": {"image": image}} if image else {})))
    world.change_installation(allowed_images=allowed)
    world.settle()
    return world


def says(world: World) -> str:
    world.operate()
    assert world.session is not None
    return json.dumps(world.session["status"])


@pytest.mark.parametrize("message", [HOSTILE, json.dumps({"reason": "CannotStart", "message": HOSTILE})])
@pytest.mark.parametrize(
    ("image", "allowed", "quotes"),
    [
        (None, ("*",), True),
        ("tinsmith.local/tinsmith/trainer:0.0.9", ("*",), True),
        ("ghcr.io/team/trainer:1", ("ghcr.io/team/*",), True),
        ("ghcr.io/team/trainer:1", ("*",), False),
    ],
    ids=["the default", "an earlier default", "one that is listed", "any"],
)
def test_words_are_quoted_of_images_that_the_platform_vouches_for(
    message: str, image: str | None, allowed: tuple[str, ...], quotes: bool
) -> None:
    world = a_world(image, *allowed)
    world.container_ends(exit_code=3, message=message)
    said = says(world)
    assert (HOSTILE in said) is quotes
    assert quotes or "status 3" in said
    assert quotes or "kubectl logs" in said


def test_the_message_of_a_pod_belongs_to_its_own_image_and_not_to_the_later_spec() -> None:
    """Otherwise a user who removes the image from the spec would make its words quotable."""
    world = a_world("ghcr.io/team/trainer:1", "*")
    world.container_ends(exit_code=3, message=HOSTILE)
    world.user_sets(pod={})
    assert HOSTILE not in says(world)


@pytest.mark.parametrize(("image", "quotes"), [(None, True), ("ghcr.io/team/trainer:1", False)])
def test_the_reason_for_a_refused_snapshot_is_redacted_too(image: str | None, quotes: bool) -> None:
    world = a_world(image, "*")
    request = "2026-01-31T12:00:00Z"
    world.user_annotates("tinsmith.dev/snapshot-requested-at", request)
    world.snapshot = SnapshotAnswer(request, None, HOSTILE)
    world.operate()
    [event] = [each for each in world.events if each.reason == "SnapshotRefused"]
    assert (HOSTILE in event.message) is quotes


def test_an_image_that_a_worker_asks_for_is_believed_of_those_that_are_vouched_for() -> None:
    """Otherwise its name would appear in the status, and nodes would contact a registry of the worker's choice."""
    world = a_world("ghcr.io/team/trainer:1", "*")
    record: dict[str, Any] = {"reason": "ImageChanged", "message": "replay", "image": f"evil.io/{HOSTILE}"}
    world.container_ends(exit_code=3, message=json.dumps(record))
    said = says(world)
    assert HOSTILE not in said
    assert "ghcr.io/team/trainer:1" in said
