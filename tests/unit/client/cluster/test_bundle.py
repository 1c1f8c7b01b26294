"""Reports reveal no planted secret, wherever it is planted, and keep everything else readable."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tinsmith.cluster.bundle import REMOVED, Redactor

SECRETS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=12, max_size=40).map("q7".__add__)
"""Secrets of letters and digits, which appear unchanged in any text."""

STRANGE = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=8, max_size=40).filter(
    lambda text: (
        text.strip() == text
        and any(character.isalnum() for character in text)
        and len(set(text)) > 4
        and text not in REMOVED
    )
)
"""Any password that a person may choose, except parts of the replacement text."""

VARIABLES = st.sampled_from(
    ["API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWORD", "clientSecret", "MY_CREDENTIALS"]
)
OBJECTS: dict[str, Callable[[str, str], Any]] = {
    "a variable": lambda name, secret: {"env": [{"name": name, "value": secret}]},
    "a field": lambda _, secret: {"data": {"password": secret, "oauth_token": secret}},
    "an argument": lambda _, secret: {"args": ["serve", "--api-key", secret, "--port", "80"]},
    "an address": lambda _, secret: {"env": [{"name": "DATABASE", "value": f"postgresql://u:{quote(secret)}@h/d"}]},
    "what kubectl applied": lambda name, secret: {
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": json.dumps({"name": name, "value": secret})}
    },
}
LINES: dict[str, str] = {
    "name=value": "connecting with password={} now",
    "an option": "started with --hub-token {} --port 80",
    "an option with =": "started with --api-key={}",
    "JSON": '{{"level": "info", "secret": "{}", "port": 80}}',
    "JSON in JSON": '{{"event": "{{\\"token\\": \\"{}\\"}}"}}',
    "YAML": "  client_secret: {}",
    "a DSN": "cannot reach postgresql+psycopg://tinsmith:{}@db:5432/tinsmith",
    "a DSN with @ in the password": "cannot reach postgresql://tinsmith:a@{}@db/tinsmith",
    "words of libpq": "host=db user=u password='{}' dbname=d",
    "a header": "Authorization: Bearer {}",
    "a header of ours": "x-api-key: {}",
    "basic authentication": "sent Basic {}",
    "a key of ours": "refused tml-{}",
    "a token of the hub": "using hf_{}",
    "a signed token": "got eyJhbGciOiJI.{}.signature",
    "a private key": "-----BEGIN EC PRIVATE KEY-----\n{}\n-----END EC PRIVATE KEY-----\nafter",
    "a private key in JSON": '{{"pem": "-----BEGIN PRIVATE KEY-----\\n{}\\n-----END PRIVATE KEY-----\\n"}}',
    "a private key cut off at the end": "-----BEGIN PRIVATE KEY-----\n{}",
    "a private key cut off at the beginning": "{}\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----",
    "a key for age": "wrote AGE-SECRET-KEY-1{}",
}


@pytest.mark.parametrize("place", OBJECTS)
@given(name=VARIABLES, secret=STRANGE)
def test_no_secret_of_an_object_survives(place: str, name: str, secret: str) -> None:
    # A secret that is also another word of the object cannot be distinguished from it.
    assume(secret not in json.dumps(OBJECTS[place](name, ""), ensure_ascii=False))
    redactor, planted = Redactor(), OBJECTS[place](name, secret)
    redactor.learn(planted)
    cleaned = json.dumps(redactor.clean(planted), ensure_ascii=False)
    assert secret not in cleaned
    assert json.dumps(secret, ensure_ascii=False)[1:-1] not in cleaned


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
@given(secret=SECRETS)
def test_no_secret_that_looks_like_one_survives_in_a_log(line: str, secret: str) -> None:
    assert secret not in Redactor().clean_text(f"before\n{line.format(secret)}\nbehind")


@given(name=VARIABLES, secret=STRANGE)
def test_a_secret_of_an_object_is_found_in_any_text(name: str, secret: str) -> None:
    redactor = Redactor()
    redactor.learn({"env": [{"name": name, "value": secret}]})
    said = [f"plain {secret} text", json.dumps({"event": f"in JSON {secret}"}), f"http://h/?q={quote(secret, safe='')}"]
    for line in said:
        cleaned = redactor.clean_text(line)
        assert secret not in cleaned
        assert json.dumps(secret)[1:-1] not in cleaned


@given(text=st.text(max_size=200))
def test_a_second_cleaning_changes_nothing(text: str) -> None:
    once = Redactor().clean_text(text)
    assert Redactor().clean_text(once) == once


def test_text_around_a_secret_is_kept() -> None:
    clean = Redactor().clean_text
    assert clean("to postgresql://u:p@db:5432/t?x=1 now") == f"to postgresql://{REMOVED}@db:5432/t?x=1 now"
    assert clean('{"token": "abc", "n": 1}') == f'{{"token": {REMOVED}, "n": 1}}'
    assert clean("password='a b' user=u") == f"password={REMOVED} user=u"


HARMLESS = [
    'secret "hub" not found; create it',
    "pull tinsmith.local/tinsmith/trainer@sha256:1f1f1f1f",
    "max_tokens=128 tokens: 4096",
    "GET https://example.com/a/b?c=d 200",
    "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    "the key of the map is here",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_harmless_words_stay(line: str) -> None:
    assert Redactor().clean_text(line) == line


def test_references_to_secrets_stay_readable() -> None:
    spec = {
        "env": [
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            {"name": "TINSMITH_OPERATOR_CA_SECRET", "value": "tinsmith-ca"},
            {"name": "OMP_NUM_THREADS", "value": "4"},
        ],
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [{"secret": {"secretName": "qwen-tls"}}],
        "automountServiceAccountToken": False,
    }
    assert Redactor().clean(spec) == spec


def test_a_word_that_is_everywhere_is_not_learned() -> None:
    redactor = Redactor()
    redactor.learn({"env": [{"name": "USE_AUTH", "value": "true"}, {"name": "AUTH_X", "value": "on"}]})
    assert redactor.clean_text("it is true that it was on") == "it is true that it was on"


def test_a_log_of_one_long_line_is_cleaned_in_no_time() -> None:
    long = "a" * 300_000 + " password=hidden " + "-" * 100_000 + "https://" * 2000
    assert "hidden" not in Redactor().clean_text(long)
