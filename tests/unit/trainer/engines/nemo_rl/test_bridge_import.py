"""The process that converts, with Megatron-Bridge as `tests/support/nemo_rl` has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from support.tiny_models import tiny_directory, tiny_model
from tinsmith_trainer.engines.nemo_rl import bridge_import
from tinsmith_trainer.engines.nemo_rl.conversion import FAILURE

BLOCKS = """
import threading
from tinsmith_trainer.engines.nemo_rl import bridge_import

def block(directory, folder):
    print("converting", flush=True)
    threading.Event().wait()

bridge_import.import_into = block
bridge_import.main(["/models/base", "/converted"])
"""


@pytest.mark.usefixtures("fake_nemo_rl")
def test_the_saved_weights_are_the_models_for_ranks_that_build_on_gpus(tmp_path: Path) -> None:
    """Megatron-Bridge saves its configuration too, which was set to convert in host memory."""
    bridge_import.import_into(tiny_directory(), tmp_path)
    iteration = tmp_path / "iter_0000000"
    assert not json.loads((iteration / "run_config.yaml").read_text())["use_cpu_initialization"]
    weights = load((iteration / "__0_0.distcp").read_bytes())
    own = dict(tiny_model().model.named_parameters())
    torch.testing.assert_close(weights["model.norm.weight"], own["model.norm.weight"], rtol=0, atol=0)


@pytest.mark.usefixtures("fake_nemo_rl")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_queries_of_a_missing_gpu_are_answered_only_during_saves(tmp_path: Path) -> None:
    """PyTorch raises where there is none, and Megatron asks although nothing is on one."""
    asked = [torch.cuda.get_rng_state, torch.cuda.synchronize, torch.cuda.current_device]
    bridge_import.import_into(tiny_directory(), tmp_path)
    assert [torch.cuda.get_rng_state, torch.cuda.synchronize, torch.cuda.current_device] == asked
    for question in asked:
        with pytest.raises((RuntimeError, AssertionError)):
            question()


@pytest.mark.usefixtures("fake_nemo_rl")
def test_a_failure_is_left_in_a_line_for_the_process_that_waits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge_import, "_end_with_parent", lambda: None)
    assert bridge_import.main([str(tmp_path / "nowhere"), str(tmp_path)]) == 1
    assert (tmp_path / FAILURE).read_text().startswith("FileNotFoundError: ")
    assert "Traceback" in capfd.readouterr().err


def test_it_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", BLOCKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"converting\n"
        child.stdin.close()
        assert child.wait(60) == 1
