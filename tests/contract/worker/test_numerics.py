"""Operations are replayed to the same bits or not at all, and a refusal names what differs."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine.reference import ReferenceEngine
from support.worker.in_process import Worker
from support.worker.process import create, step, train
from tinsmith_trainer.errors import NumericsChanged, ServerError
from tinsmith_trainer.options import WorkerOptions, parse_options
from tinsmith_trainer.worker import numerics
from tinsmith_trainer.worker.numerics import (
    FAST,
    FLAGS,
    MODE,
    THREADS,
    THREADS_VARIABLE,
    check_numerics,
    keep_threads,
    mode_of,
)
from tinsmith_trainer.worker.startup import with_journal
from tinsmith_trainer.worker.termination_log import termination_record
from tinsmith_trainer.worker.volume import Volume

from .test_image import disk_of_a_crash

BEFORE = {"--dtype": "float32", "PyTorch": "2.15.0", THREADS: "3", "device": "CPU with AVX512"}
DECIDE_NO_BITS = {
    *("model", "model_name", "model_revision", "max_sequence_length"),  # the weights have a check of their own
    *("role", "worker_id", "volume", "image", "socket", "listen", "tls_directory", "health_address"),
    *("termination_log", "checkpoint_root", "saves_socket", "offered_saves_bytes", "parent_fd", "log_format"),
    *("log_level", "adapter_slots", "model_places", "max_rank", "sampling", "deterministic_sampling"),
    *("kv_cache_bytes", "snapshot_replay_seconds", "snapshot_cost_factor", "reserved_bytes"),
    *("attempts_per_operation", "hang_timeout_seconds", "gpus", "server_argument", "server_start_timeout_seconds"),
    *("scratch", "server_environment", "ray_address"),
    "report_co_batching",  # a metric, which also depends on other tenants' calls
    "device",  # by its name, once the engine is loaded
}


def check(volume: Volume, now: dict[str, str]) -> None:
    with_journal(volume, lambda journal: check_numerics(journal, now, volume))


async def crashed(folder: Path, *, stops: bool = False) -> Volume:
    """Return a journal whose operations ran under BEFORE, with a result that only a replay brings back."""
    check(Volume(folder / "volume"), BEFORE)
    worker = Worker(folder)
    await worker.service.activate(1)
    await worker.submit(create(), train(1), step(2))
    await worker.finished(2)
    if stops:
        await worker.service.drain()
    volume = disk_of_a_crash(folder, folder / "crashed")
    if not stops:
        await worker.service.drain()
    return volume


@pytest.mark.core("durability 6")
@pytest.mark.parametrize("name", BEFORE)
async def test_operations_are_not_replayed_under_other_numerics(tmp_path: Path, name: str) -> None:
    volume = await crashed(tmp_path)
    sentence = rf"2 operation.*stop cleanly.*: {re.escape(name)} was {re.escape(BEFORE[name])} and is another\.$"
    for _ in range(2):  # a refusal remembers nothing
        with pytest.raises(NumericsChanged, match=sentence):
            check(volume, BEFORE | {name: "another"})
    check(volume, BEFORE)


async def test_fast_numerics_replay_operations_that_ran_under_any_others(tmp_path: Path) -> None:
    volume = await crashed(tmp_path)
    check(volume, dict.fromkeys(BEFORE, "another") | {MODE: FAST})
    with pytest.raises(NumericsChanged, match=f"{MODE} was fast and is exact"):
        check(volume, dict.fromkeys(BEFORE, "another") | {MODE: "exact"})


@pytest.mark.parametrize(("requested", "engine"), [("fast", "exact"), ("exact", "fast")])
def test_a_mode_that_the_engine_does_not_have_is_refused(requested: str, engine: Any) -> None:
    capabilities = replace(ReferenceEngine().capabilities(), numerics=engine)
    with pytest.raises(ServerError, match=f"--numerics {requested}: .* computes with {engine} numerics only; omit"):
        mode_of(options("--numerics", requested), capabilities)
    assert mode_of(options(), capabilities) == mode_of(options("--numerics", engine), capabilities) == engine


async def test_fast_numerics_keep_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(numerics.sys.modules, "torch", None)
    monkeypatch.setenv(THREADS_VARIABLE, "7")
    volume = await crashed(tmp_path)
    check(volume, BEFORE | {MODE: FAST})
    with_journal(volume, keep_threads)
    assert os.environ[THREADS_VARIABLE] == "7"


async def test_a_refusal_names_the_variable_that_accepts_these_numerics_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind of GPU may be gone for good."""
    volume, other = await crashed(tmp_path), BEFORE | {"device": "another"}
    with pytest.raises(NumericsChanged) as refusal:
        check(volume, other)
    variable, _, value = next(word for word in str(refusal.value).split() if "=" in word).partition("=")
    monkeypatch.setenv(variable, value)
    with pytest.raises(NumericsChanged):
        check(volume, BEFORE | {"device": "a third one"})
    check(volume, other)
    monkeypatch.delenv(variable)
    check(volume, other)


async def test_a_long_refusal_keeps_its_cures_in_a_termination_log(tmp_path: Path) -> None:
    volume, long = await crashed(tmp_path), "x" * 200
    with pytest.raises(NumericsChanged) as refusal:
        check(volume, dict.fromkeys(BEFORE, long))
    message = termination_record(refusal.value)["message"]
    assert message.endswith("…")
    assert "let it stop cleanly" in message
    assert "accepts other weights" in message


async def test_a_refusal_names_all_that_differs_and_nothing_else(tmp_path: Path) -> None:
    volume = await crashed(tmp_path)
    with pytest.raises(
        NumericsChanged, match=r"--dtype was float32 and is bfloat16; PyTorch was 2\.15\.0 and is not set\."
    ):
        check(volume, {**BEFORE, "--dtype": "bfloat16", "a later thing": "on"} | {"PyTorch": "not set"})


async def test_threads_are_as_before_while_operations_are_replayed_and_else_as_the_machine_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that changed between a crash and its replay must not change gradients by 1e-6."""
    monkeypatch.setitem(numerics.sys.modules, "torch", None)
    monkeypatch.setenv(THREADS_VARIABLE, "7")
    with_journal(await crashed(tmp_path / "stopped", stops=True), keep_threads)
    assert os.environ[THREADS_VARIABLE] == "7"
    with_journal(await crashed(tmp_path / "killed"), keep_threads)
    assert os.environ[THREADS_VARIABLE] == "3"


def options(*flags: str) -> WorkerOptions:
    return parse_options(["--model", "m", "--volume", "/v", "--checkpoint-root", "file:///c", "--socket", "/s", *flags])


@pytest.mark.parametrize(
    "flags",
    [
        *(("--dtype", "bfloat16"), ("--quantization", "8bit"), ("--token-budget", "512"), ("--loss-kernel", "torch")),
        *(("--lora-products", "bfloat16"), ("--recompute", "layers"), ("--no-map-stable-reinforce",)),
        *(("--engine", "nemo-rl"), ("--engine", "support.engine.reference:build_reference")),
    ],
    ids=" ".join,
)
def test_each_flag_that_decides_bits_is_among_the_numerics(flags: tuple[str, ...]) -> None:
    assert numerics.numerics_of(options(*flags), "exact") != numerics.numerics_of(options(), "exact")


def test_every_flag_is_known_to_decide_bits_or_not_to() -> None:
    """A new one must be in one of the two lists."""
    every: set[str] = set()
    for kind in WorkerOptions.__mro__:
        every |= set(vars(kind).get("__annotations__", {}))
    assert every == {"numerics", *FLAGS, *DECIDE_NO_BITS}
    assert not {*FLAGS} & DECIDE_NO_BITS


@pytest.mark.parametrize(
    ("name", "reported_mib"), [("H100", (81079, 81559)), ("H200", (143156, 143771)), ("L4", (22478, 22570))]
)
def test_a_gpu_counts_as_the_same_for_any_memory_use_of_its_driver(
    monkeypatch: pytest.MonkeyPatch, name: str, reported_mib: tuple[int, int]
) -> None:
    """Otherwise a node whose driver is replaced could not replay."""
    torch: Any = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = set()
    for mib in reported_mib:
        properties = SimpleNamespace(name=name, total_memory=mib * 2**20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=properties: gpu)
        found.add(numerics.numerics_of(options("--device", "cuda"), "exact")["device"])
    assert len(found) == 1


async def test_after_a_clean_stop_other_numerics_are_accepted(tmp_path: Path) -> None:
    volume = await crashed(tmp_path, stops=True)
    check(volume, BEFORE | {"PyTorch": "2.16.0"})


async def test_a_value_that_a_journal_does_not_have_yet_is_no_difference(tmp_path: Path) -> None:
    volume = await crashed(tmp_path)
    check(volume, {**BEFORE, "a later thing": "on"})
    with pytest.raises(NumericsChanged, match="a later thing was on and is off"):
        check(volume, {**BEFORE, "a later thing": "off"})
