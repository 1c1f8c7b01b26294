"""The rows of docs/reference/limits.md. The rows list every limit of the API server, and what happens at the limit."""

from __future__ import annotations

from tinsmith_server.cli import connections
from tinsmith_server.routes.http import uploads
from tinsmith_server.services.accounts import body_budget
from tinsmith_server.services.checkpoints import promotions
from tinsmith_server.services.recordings import recordings
from tinsmith_server.settings import Settings
from tinsmith_server.wire import json_training, plain_requests, requests
from tinsmith_server.wire.json_bodies import PLAIN, PROMPT

KIB = 2**10
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", KIB))

WAITS = f"The request waits up to {body_budget.WAIT_SECONDS:g} s, then 429 with Retry-After. The SDK retries."
LATER = "429 with Retry-After."
REJECTED = "The future fails, category `user`."

BY_SETTING = {
    "max_body_bytes": REJECTED,
    "max_sample_bytes": "413 at once.",
    "body_bytes_per_tenant": WAITS,
    "body_bytes_in_all": WAITS,
    "connections_per_address": "The connection is closed; behind a trusted proxy 429. The SDK retries.",
    "requests_per_minute": LATER,
    "trained_tokens_per_minute": f"The next call waits up to 20 s, then {LATER}",
    "sampled_tokens_per_minute": f"The next sample: {LATER}",
    "adapters_per_tenant": REJECTED,
    "queued_operations_per_tenant": "The next operation waits up to 20 s, then 429. Gaps can be filled.",
    "checkpoint_bytes_per_tenant": f"Named saves: {REJECTED}",
    "recording_bytes_per_tenant": "400 at the next turn, 422 at the next recording.",
    "max_upload_bytes": "413 at once.",
    "uploads_per_tenant": "422 at the first file of the next one.",
    "samples_per_tenant": "429; the SDK retries without limit.",
    "ephemeral_per_tenant": "The oldest unnamed weights are removed; samples from them get 410.",
}


def setting_rows() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, seen in BY_SETTING.items():
        field = Settings.model_fields[name]
        default = _size(field.default) if "bytes" in name else str(field.default or "none")
        rows.append((f"`{name}`", default, seen))
    return rows


def fixed_rows() -> list[tuple[str, ...]]:
    metadata = f"{_size(requests.METADATA_BYTES)} as JSON, {requests.METADATA_KEYS} keys"
    return [
        ("`user_metadata`", metadata, f"422, or: {REJECTED}"),
        ("tags of a session", str(requests.MAX_TAGS), "422"),
        ("stop strings or tokens of a sample", str(requests.MAX_STOPS), REJECTED),
        ("samples of one request", str(requests.MAX_SAMPLES), REJECTED),
        ("values in a body", f"{PLAIN.values}; of a sample {PROMPT.values}, without long lists of tokens", "422"),
        (
            "values in training data in JSON",
            f"{json_training.VALUES}, without long lists of numbers",
            "422",
        ),
        ("training data in JSON, without its lists", _size(json_training.BYTES_WITHOUT_NUMBERS), "422"),
        ("depth of a body", str(PLAIN.depth), "422"),
        ("promoted names of a tenant", str(promotions.NAMES_PER_TENANT), "422 at one more"),
        (
            "history of a promoted name",
            f"{promotions.KEPT_PER_NAME} changes",
            "the oldest is forgotten",
        ),
        ("recordings of a tenant", str(recordings.RECORDINGS_PER_TENANT), "422 at one more"),
        (
            "turns of a recording",
            f"{plain_requests.DEFAULT_TURNS}; `max_turns` up to {plain_requests.MOST_TURNS}",
            "400 at one more",
        ),
        (
            "size of a recording",
            f"{_size(plain_requests.DEFAULT_RECORDING_BYTES)}; `max_bytes` up to "
            f"{_size(plain_requests.MOST_RECORDING_BYTES)}",
            "400 at the next turn",
        ),
        (
            "time of a recording",
            f"{plain_requests.DEFAULT_RECORDING_SECONDS} s; `ttl_seconds` up to "
            f"{plain_requests.MOST_RECORDING_SECONDS}",
            "404",
        ),
        ("a sample, without its tokens and images", _size(PROMPT.bytes_without_numbers or 0), "422"),
        (
            "the slowest body",
            f"{_size(uploads.LEAST_BYTES_PER_SECOND)} a second after {uploads.GRACE_SECONDS:g} s, "
            f"{uploads.LONGEST_SECONDS:g} s in all",
            "408; the SDK retries",
        ),
        (
            "a request's header",
            f"{_size(connections.HEAD_BYTES)}, {connections.HEAD_FIELDS} fields, {connections.HEAD_SECONDS:g} s",
            "431, or 408, at once",
        ),
        ("an idle connection", f"{connections.KEEP_ALIVE_SECONDS:g} s", "it is closed; the SDK keeps one for 90 s"),
        ("a client that reads nothing of an answer", f"{connections.STALL_SECONDS:g} s", "the connection is closed"),
    ]


def _whole(path: str) -> str:
    """Return the path with the prefix of Tinker's own calls."""
    return path if path.startswith(("/oai/", "/anthropic/")) else f"/api/v1{path}"


def body_rows() -> list[tuple[str, ...]]:
    """Return each limit on request bodies, with the calls that have this limit."""
    calls: dict[str, list[str]] = {}
    for path, limit in sorted(uploads.BODY_BYTES.items()):
        calls.setdefault(f"`{limit}`" if isinstance(limit, str) else _size(limit), []).append(f"`{_whole(path)}`")
    commonest = max(calls, key=lambda limit: len(calls[limit]))
    rows = [(limit, ", ".join(paths)) for limit, paths in calls.items() if limit != commonest]
    return [*rows, (commonest, "all others")]


def _size(size: int) -> str:
    for name, unit in UNITS:
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"
