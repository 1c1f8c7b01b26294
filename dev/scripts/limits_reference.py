"""Rows of docs/reference/limits.md: every limit of the API server, where it stands, and what is seen at it."""

from __future__ import annotations

from tinsmith_server.cli import connections
from tinsmith_server.routes import uploads
from tinsmith_server.services.accounts import body_budget
from tinsmith_server.services.checkpoints import promotions
from tinsmith_server.settings import Settings
from tinsmith_server.wire import json_training, requests
from tinsmith_server.wire.json_bodies import PLAIN, PROMPT

KIB = 2**10
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", KIB))

WAITS = f"It waits up to {body_budget.WAIT_SECONDS:g} s, then gets 429 with Retry-After. The SDK sends it again."
LATER = "429 with Retry-After, the time until there is room."
REJECTED = "The future fails with a sentence, category `user`."

BY_SETTING = {
    "max_body_bytes": f"{REJECTED} Of the body only the beginning is read.",
    "max_sample_bytes": "413 with a sentence, at once.",
    "body_bytes_per_tenant": WAITS,
    "body_bytes_in_all": WAITS,
    "connections_per_address": "The connection ends without a word; behind a trusted proxy 429. The SDK tries again.",
    "requests_per_minute": LATER,
    "trained_tokens_per_minute": f"The next call waits up to 20 s, then {LATER}",
    "sampled_tokens_per_minute": f"For the next sample {LATER}",
    "adapters_per_tenant": REJECTED,
    "queued_operations_per_tenant": "The next operation waits up to 20 s, then 429; what fills a gap goes through.",
    "checkpoint_bytes_per_tenant": f"Of a save with a name: {REJECTED}",
    "max_upload_bytes": "413 with a sentence, at once.",
    "uploads_per_tenant": "422 at the first file of another one.",
    "samples_per_tenant": "429; the SDK holds its samples back and sends them again, without limit.",
    "ephemeral_per_tenant": "The oldest unnamed weights go; samples from them answer 410.",
}


def setting_rows() -> list[tuple[str, ...]]:
    rows = []
    for name, seen in BY_SETTING.items():
        field = Settings.model_fields[name]
        default = _size(field.default) if "bytes" in name else str(field.default or "none")
        rows.append((f"`{name}`", (field.description or "").rstrip("."), default, seen))
    return rows


def fixed_rows() -> list[tuple[str, ...]]:
    metadata = f"{_size(requests.METADATA_BYTES)} as JSON, {requests.METADATA_KEYS} keys"
    return [
        ("`user_metadata`", metadata, f"422; where there is a future: {REJECTED}"),
        ("tags of a session", str(requests.MAX_TAGS), "422"),
        ("stop strings or tokens of a sample", str(requests.MAX_STOPS), REJECTED),
        ("samples of one request", str(requests.MAX_SAMPLES), REJECTED),
        ("values in a body", f"{PLAIN.values}; of a sample {PROMPT.values}, long lists of tokens apart", "422"),
        (
            "values in training data in JSON",
            f"{json_training.VALUES}, long lists of numbers apart; in these a quarter of `max_body_bytes`",
            "422",
        ),
        ("bytes of training data in JSON without its lists", _size(json_training.BYTES_BESIDE_NUMBERS), "422"),
        ("depth of a body", str(PLAIN.depth), "422"),
        ("promoted names of a tenant", str(promotions.NAMES_PER_TENANT), "422 at one more"),
        (
            "what a promoted name is remembered to have stood for",
            f"{promotions.KEPT_PER_NAME} changes",
            "the oldest is forgotten",
        ),
        ("bytes of a sample without its tokens and images", _size(PROMPT.bytes_beside_numbers or 0), "422"),
        (
            "how slowly a body may come",
            f"{_size(uploads.LEAST_BYTES_PER_SECOND)} a second after {uploads.GRACE_SECONDS:g} s, "
            f"{uploads.LONGEST_SECONDS:g} s in all",
            "408, which the SDK repeats",
        ),
        (
            "a request's header",
            f"{_size(connections.HEAD_BYTES)}, {connections.HEAD_FIELDS} fields, {connections.HEAD_SECONDS:g} s",
            "431, or 408, at once",
        ),
        ("an idle connection", f"{connections.KEEP_ALIVE_SECONDS:g} s", "it ends; the SDK keeps one for 90 s"),
        ("a reader who takes nothing of an answer", f"{connections.STALL_SECONDS:g} s", "the connection ends"),
    ]


def _whole(path: str) -> str:
    """Return whether the path belongs to a dialect: Tinker's own calls lie below a prefix."""
    return path if path.startswith(("/oai/", "/anthropic/")) else f"/api/v1{path}"


def body_rows() -> list[tuple[str, ...]]:
    return [
        (f"`{_whole(path)}`", f"`{limit}`" if isinstance(limit, str) else _size(limit))
        for path, limit in sorted(uploads.BODY_BYTES.items())
    ]


def _size(size: int) -> str:
    for name, unit in UNITS:
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"
