"""tinker-cloud's acceptance programs, unmodified: `make test-tinker-cloud TINKER_CLOUD=…` runs them from a checkout.

The programs send plain calls between the calls of the SDK, on the same models. They assume a server with their name for
the model, and compare numbers bit by bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tinsmith.local_server import running_server
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model
from transformers import Qwen2Config, Qwen2ForCausalLM

pytestmark = [pytest.mark.tinker_cloud, pytest.mark.timeout(600)]

MODEL = "Qwen/Qwen2.5-0.5B"
API_KEY = "tml-dev-key"
# The programs draw token ids below 50,000.
SHAPE = TinyShape(vocab_size=51_200)
GATES = ("g1_seam_parity", "g4_pool_isolation", "g5_pinned_v0", "g6_batch_invariance", "g7_reorder_merge")


@pytest.fixture(scope="module")
def gates() -> Path:
    checkout = os.environ.get("TINKER_CLOUD")
    if not checkout:
        pytest.fail("set TINKER_CLOUD to a checkout of GMISWE/tinker-cloud")
    return Path(checkout) / "scripts" / "gates"


def make_random_qwen2(directory: Path) -> Path:
    """Write a random Qwen2 with a tokenizer."""
    make_tiny_model(directory, shape=SHAPE)
    config = Qwen2Config(
        vocab_size=SHAPE.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("server")
    model = make_random_qwen2(scratch / "model")
    arguments = [f"--data={scratch}/data", f"--model={MODEL}={model}", "--log-level=warning"]
    # Two programs check by a metric that calls of two tenants shared a forward.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINSMITH_ENGINE_FLAGS", "--report-co-batching")
        with running_server(arguments, API_KEY, scratch) as url:
            yield url


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_passes(gate: str, gates: Path, url: str) -> None:
    environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"}
    program = [sys.executable, str(gates / f"{gate}.py")]
    done = subprocess.run(
        program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
