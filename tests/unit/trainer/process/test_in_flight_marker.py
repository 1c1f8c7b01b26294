"""The marker outlives the process that made it, and blames a call for that end alone which came in its middle."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.errors import VolumeUnsuitable
from tinsmith_trainer.process import exit as process_exit
from tinsmith_trainer.process import in_flight_marker
from tinsmith_trainer.process.exit import end_process, end_without_blame, register_marker
from tinsmith_trainer.process.in_flight_marker import HEADER, EngineCall, InFlightMarker, InFlightWork, Interruption

WORK = InFlightWork("operation", "sess:train:0", 7)


def left_in(path: Path) -> Interruption | None:
    """Return the marker as the next process reads it."""
    return InFlightMarker(path).left_behind


def test_a_process_that_ended_in_a_call_leaves_the_purpose_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "running"
    marker = InFlightMarker(path)
    assert marker.left_behind is None
    with EngineCall(marker).at(WORK):
        left = left_in(path)
    assert left is not None
    assert (left.work, left.last_sign) == (WORK, "")
    assert left_in(path) is None


def test_the_work_of_another_thread_stays_marked_during_engine_calls(tmp_path: Path) -> None:
    marker, save = InFlightMarker(tmp_path / "running"), InFlightWork("operation", "sess:train:1", 3)
    marker.mark_background("saves", save)
    with EngineCall(marker).at(WORK):
        left = left_in(tmp_path / "running")
        assert left is not None
        assert left.suspects == (WORK, save)
    alone = left_in(tmp_path / "running")
    assert alone is not None
    assert alone.suspects == (save,)
    marker.mark_background("saves")
    assert left_in(tmp_path / "running") is None


def test_an_error_that_ends_the_process_leaves_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), EngineCall(InFlightMarker(tmp_path / "running")).at(WORK):
        raise SystemExit(1)
    assert left_in(tmp_path / "running") is not None


def test_an_orderly_stop_blames_no_call_before_or_after_it(tmp_path: Path) -> None:
    call = EngineCall(InFlightMarker(tmp_path / "running"))
    with call.at(WORK):
        assert call.prepare_stop(hang_seconds=60)
        assert left_in(tmp_path / "running") is None
    with call.at(WORK):
        assert left_in(tmp_path / "running") is None


def test_a_stop_because_of_a_hang_blames_the_call_that_hangs_until_it_returns(tmp_path: Path) -> None:
    call = EngineCall(InFlightMarker(tmp_path / "running"))
    with call.at(WORK):
        assert not call.prepare_stop(hang_seconds=0)
        left = left_in(tmp_path / "running")
        assert left is not None
        assert left.last_sign == "it was still running after 0 s, when the worker was asked to stop"
    assert left_in(tmp_path / "running") is None


def test_an_end_with_a_reason_leaves_it_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    marker = InFlightMarker(tmp_path / "running")
    register_marker(marker)
    with EngineCall(marker).at(WORK):
        try:
            raise RuntimeError("rank 1\n  of 2 is gone; " + "and more " * 100)
        except RuntimeError:
            end_process("the ranks are lost")
        left = left_in(tmp_path / "running")
    assert left is not None
    assert left.last_sign.startswith("the ranks are lost: rank 1 of 2 is gone; and more")
    assert left.last_sign.endswith("…")


def test_a_reason_with_invalid_text_is_recorded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    marker = InFlightMarker(tmp_path / "running")
    register_marker(marker)
    with EngineCall(marker).at(WORK):
        try:
            raise RuntimeError(os.fsdecode(b"no file \xff"))
        except RuntimeError:
            end_process("the ranks are lost")
        left = left_in(tmp_path / "running")
    assert left is not None
    assert left.last_sign == r"the ranks are lost: no file \udcff"


def test_a_process_ends_even_where_its_reason_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(process_exit.log, "exception", broken)
    with pytest.raises(OSError, match="no room"):
        end_process("the ranks are lost")
    assert ended == [1]


def broken(_event: str) -> None:
    raise OSError("no room")


def test_an_end_that_is_not_the_calls_doing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    marker = InFlightMarker(tmp_path / "running")
    register_marker(marker)
    with EngineCall(marker).at(WORK):
        end_without_blame()
        assert left_in(tmp_path / "running") is None


def test_the_end_of_the_server_is_not_the_calls_doing(tmp_path: Path) -> None:
    program = (
        "import sys, threading, pathlib\n"
        "from tinsmith_trainer.process import in_flight_marker as markers, exit as process_exit\n"
        "from tinsmith_trainer.worker import main\n"
        f"marker = markers.InFlightMarker(pathlib.Path({str(tmp_path / 'running')!r}))\n"
        "process_exit.register_marker(marker)\n"
        "marker.set(markers.InFlightWork('operation', 'sess:train:0', 7))\n"
        "print('marked', flush=True)\n"
        "main._die_with_parent(0)\n"
        "threading.Event().wait()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"marked\n"
    child.stdin.close()
    assert child.wait() == 1
    child.stdout.close()
    assert left_in(tmp_path / "running") is None


def test_a_disk_that_takes_no_marker_fails_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    call = EngineCall(InFlightMarker(tmp_path / "running"))
    monkeypatch.setattr(in_flight_marker.os, "pwrite", refuse)
    with call.at(WORK):
        pass


@given(
    model_id=st.text(max_size=80),
    seq_id=st.integers(0, 2**62),
    sign=st.text(max_size=200),
    others=st.lists(st.builds(InFlightWork, st.just("operation"), st.text(max_size=20), st.integers(0, 9)), max_size=7),
    cut=st.integers(0, 10_000),
    flipped=st.integers(0, 10_000),
)
def test_a_marker_is_read_as_it_was_written_or_not_at_all(
    model_id: str, seq_id: int, sign: str, others: list[InFlightWork], cut: int, flipped: int
) -> None:
    """A power cut may leave any part of it."""
    interruption = Interruption(InFlightWork("replay", model_id, seq_id), "life", sign, tuple(others))
    content = in_flight_marker._encoded(interruption)
    assert in_flight_marker._decoded(content) == interruption
    assert in_flight_marker._decoded(content + b"the rest of a longer one before") == interruption
    assert in_flight_marker._decoded(content[: cut % len(content)]) is None
    damaged = bytearray(content)
    damaged[flipped % len(content)] ^= 0x40
    assert in_flight_marker._decoded(bytes(damaged)) is None


def test_a_marker_of_a_later_release_that_says_more_is_read(tmp_path: Path) -> None:
    """Otherwise no process would start after a downgrade."""
    work = {"purpose": "operation", "model_id": "m", "seq_id": 3, "tenant": "t"}
    body = orjson.dumps({"work": work, "beside": [work], "life": "x", "last_sign": "", "since": 1})
    (tmp_path / "running").write_bytes(HEADER.pack(len(body), zlib.crc32(body)) + body)
    found = InFlightMarker(tmp_path / "running").left_behind
    assert found == Interruption(InFlightWork("operation", "m", 3), "x", "", (InFlightWork("operation", "m", 3),))


def test_the_keys_of_a_marker_are_pinned(tmp_path: Path) -> None:
    """Upgrades and downgrades read them: a process refuses to start without a key, and blames one call for another."""
    path = tmp_path / "running"
    marker = InFlightMarker(path)
    marker.mark_background("saves", InFlightWork("operation", "sess:train:1", 3))
    with EngineCall(marker).at(WORK):
        content = path.read_bytes()
    length, _ = HEADER.unpack_from(content)
    assert orjson.loads(content[HEADER.size : HEADER.size + length]) == {
        "work": {"purpose": "operation", "model_id": "sess:train:0", "seq_id": 7},
        "life": marker.life,
        "last_sign": "",
        "beside": [{"purpose": "operation", "model_id": "sess:train:1", "seq_id": 3}],
    }


def test_an_error_that_an_operation_answers_with_leaves_no_marker(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrong"), EngineCall(InFlightMarker(tmp_path / "running")).at(WORK):
        raise ValueError("wrong")
    assert left_in(tmp_path / "running") is None


def test_a_stop_blames_no_other_thread_either(tmp_path: Path) -> None:
    marker = InFlightMarker(tmp_path / "running")
    marker.mark_background("saves", WORK)
    marker.stop()
    assert left_in(tmp_path / "running") is None
    marker.mark_background("saves", WORK)
    assert left_in(tmp_path / "running") is None


def test_a_closed_marker_ignores_later_calls(tmp_path: Path) -> None:
    """The thread of a save may outlast the stop, and its file descriptor may be another file's by then."""
    marker = InFlightMarker(tmp_path / "running")
    marker.close()
    marker.close()
    marker.set(WORK)
    assert left_in(tmp_path / "running") is None


def test_a_marker_that_cannot_be_opened_makes_the_volume_unsuitable(tmp_path: Path) -> None:
    with pytest.raises(VolumeUnsuitable, match="cannot be opened: No such file or directory"):
        InFlightMarker(tmp_path / "absent" / "running")
