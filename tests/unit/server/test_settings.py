"""The sources of settings, their precedence, and refused values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tinsmith_server.configuration import describe_settings, load_settings, unknown_variables
from tinsmith_server.errors import StartupError
from tinsmith_server.settings import Settings

IN_A_CLUSTER: dict[str, object] = {"fleet": "kubernetes", "checkpoint_root": "s3://b"}


@pytest.fixture(autouse=True)
def _no_settings_around_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TINSMITH_")]:
        monkeypatch.delenv(name)


def write(path: Path, content: object) -> Path:
    path.write_text(yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content))
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "c.yaml", {"host": "file", "port": 1, "max_rank": 5})
    monkeypatch.setenv("TINSMITH_HOST", "environment")
    monkeypatch.setenv("TINSMITH_PORT", "2")
    settings = load_settings({"host": "flag", "port": None}, file)
    assert (settings.host, settings.port, settings.max_rank, settings.adapter_slots) == ("flag", 2, 5, 8)


def test_without_a_setting_an_adapter_may_have_the_rank_that_recipes_of_the_cookbook_ask_for() -> None:
    assert load_settings({}).max_rank == 128


def test_a_quotation_without_an_end_among_an_engines_flags_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_ENGINE_FLAGS", "--ranks '2")
    with pytest.raises(StartupError, match=r"TINSMITH_ENGINE_FLAGS.*no closing quotation"):
        load_settings({}, None)


@pytest.mark.parametrize(
    ("namespaces", "sentence"), [("Team", "'Team' is not a valid namespace"), ("*,team", "use it alone")]
)
def test_an_invalid_namespace_is_refused(namespaces: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_FLEET_NAMESPACES", namespaces)
    with pytest.raises(StartupError, match=sentence):
        load_settings({"fleet": "kubernetes", "checkpoint_root": "s3://bucket"})


def test_an_unknown_key_in_a_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"unknown setting prot \(did you mean port\?\) in .*settings are: .*port"):
        load_settings({}, write(tmp_path / "c.yaml", {"prot": 1}))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("[1, 2]", "must contain a mapping"), ("a: [", "neither YAML nor JSON"), (None, "cannot read")],
)
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartupError, match=sentence):
        load_settings({}, file)


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 70000), ("poll_hold_seconds", 0), ("poll_hold_seconds", 60), ("api_key", "x"), ("max_rank", "many")],
)
def test_a_value_that_does_not_fit_is_refused_by_name(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TINSMITH_{name.upper()}", str(value))
    with pytest.raises(StartupError, match=f"^TINSMITH_{name.upper()}: "):
        load_settings({})


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("flag", "--port: 70000 is invalid: input should be less than or equal to 65535"),
        ("environment", "TINSMITH_PORT: '70000' is invalid: input should be less than or equal to 65535"),
        ("file", "port in {file}: 70000 is invalid: input should be less than or equal to 65535"),
    ],
)
def test_a_refusal_says_where_the_value_was_set(
    where: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    load: dict[str, Callable[[], Settings]] = {
        "flag": lambda: load_settings({"port": 70000}),
        "environment": lambda: load_settings({}),
        "file": lambda: load_settings({}, write(file, {"port": 70000})),
    }
    if where == "environment":
        monkeypatch.setenv("TINSMITH_PORT", "70000")
    with pytest.raises(StartupError) as refusal:
        load[where]()
    assert str(refusal.value) == sentence.format(file=file)


def test_a_refused_key_is_not_shown() -> None:
    with pytest.raises(StartupError) as refusal:
        load_settings({"api_key": "hunter2"})
    assert "hunter2" not in str(refusal.value)


def test_an_unknown_variable_is_named_with_the_similar_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown_variables() is None
    monkeypatch.setenv("TINSMITH_PROT", "8001")
    monkeypatch.setenv("TINSMITH_HOST", "::1")
    assert unknown_variables() == "not a setting: TINSMITH_PROT (did you mean TINSMITH_PORT?)"


def test_secrets_are_shown_as_comments_and_the_output_can_be_read(tmp_path: Path) -> None:
    values = {"api_key": "tml-hunter2", "database_url": "postgresql://me:hunter2@host/db", "data": tmp_path}
    shown = describe_settings(load_settings(values))
    assert "hunter2" not in shown
    assert "# database_url: postgresql://me:***@host/db  (set;" in shown
    (tmp_path / "c.yaml").write_text(shown)
    again = load_settings({}, tmp_path / "c.yaml")
    assert (again.api_key, again.database_url) == (None, None)


def test_the_printed_settings_of_a_server_in_a_cluster_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    settings = load_settings(IN_A_CLUSTER)
    file.write_text(describe_settings(settings))
    assert load_settings({}, file) == settings


def test_trap_20_no_hold_can_be_set_that_outlives_the_sdks_poll() -> None:
    """The SDK's own timeout is 45 s; doubled by its transport, but not by every one."""
    with pytest.raises(StartupError, match="poll-hold-seconds"):
        load_settings({"poll_hold_seconds": 45})
    assert load_settings({}).poll_hold_seconds < 30


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"fleet": "kubernetes"}, "checkpoint_root: must be set with fleet `kubernetes`"),
        (
            {**IN_A_CLUSTER, "models": ["a=b"]},
            "models: has no effect with fleet `kubernetes`, where TrainingSessions set it; remove it",
        ),
        ({**IN_A_CLUSTER, "engine": "nemo-rl"}, "engine: has no effect with fleet `kubernetes`"),
        ({**IN_A_CLUSTER, "engine_flags": "--ranks 2"}, "engine_flags: has no effect with fleet `kubernetes`"),
        ({**IN_A_CLUSTER, "sampler": "vllm"}, "sampler: has no effect with fleet `kubernetes`"),
        ({**IN_A_CLUSTER, "quantization": "4bit"}, "quantization: has no effect with fleet `kubernetes`"),
        ({"sampler": "vllm", "quantization": "4bit"}, "quantization: vllm would sample other weights"),
        ({"sampler_flags": "--gpus 2"}, "are for sampler `vllm` or `sglang`"),
        ({"sampler": "vllm", "deterministic_sampling": True}, "deterministic_sampling: vllm does not support it"),
        ({**IN_A_CLUSTER, "adapter_slots": 4}, "adapter_slots: has no effect with fleet `kubernetes`"),
        ({**IN_A_CLUSTER, "model_places": 4}, "model_places: has no effect with fleet `kubernetes`"),
        ({**IN_A_CLUSTER, "max_rank": 8}, "max_rank: has no effect with fleet `kubernetes`"),
        (
            {**IN_A_CLUSTER, "deterministic_sampling": True},
            "deterministic_sampling: has no effect",
        ),
        ({"fleet_namespaces": ["team"]}, "fleet_namespaces and scaler_port are for fleet `kubernetes`"),
        ({"scaler_port": 9092}, "fleet_namespaces and scaler_port are for fleet `kubernetes`"),
        ({**IN_A_CLUSTER, "scaler_tls_directory": "/tls"}, "scaler_tls_directory: has no effect without scaler_port"),
        ({"fleet": "slurm"}, "fleet in .*: 'slurm' is invalid"),
    ],
)
def test_a_setting_that_the_fleet_would_not_read_is_refused(
    tmp_path: Path, values: dict[str, object], sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        load_settings({}, write(tmp_path / "c.yaml", values))


def test_fewer_places_than_slots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="model_places: 7 is less than adapter_slots, 8"):
        load_settings({"model_places": 7})
    assert load_settings({"model_places": 8}).model_places == 8


def test_a_timeout_shorter_than_a_held_poll_is_refused() -> None:
    with pytest.raises(StartupError, match=r"session_timeout_seconds: 49\.9 is less than twice poll_hold_seconds, 25"):
        load_settings({"session_timeout_seconds": 49.9})
    assert load_settings({"session_timeout_seconds": 50}).session_timeout_seconds == 50
    assert load_settings({"session_timeout_seconds": 2, "poll_hold_seconds": 1}).session_timeout_seconds == 2


@pytest.mark.parametrize(
    ("values", "kept_here"),
    [
        ({}, True),
        ({"database_url": "postgresql://db/t"}, True),
        ({"database_url": "postgresql://db/t", "checkpoint_root": "s3://b"}, False),
    ],
)
def test_a_server_that_keeps_everything_elsewhere_needs_no_directory(values: dict[str, str], kept_here: bool) -> None:
    assert load_settings(values).keeps_data_here is kept_here


@pytest.mark.parametrize("devices", [0, [0], ["0"]])
def test_a_file_may_name_devices_by_number(tmp_path: Path, devices: object) -> None:
    assert load_settings({}, write(tmp_path / "c.yaml", {"devices": devices})).devices == ("0",)
