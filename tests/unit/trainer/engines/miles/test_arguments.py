"""The command line that Miles gets, and what is refused before it gets one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.miles.ranks import arguments_of, stand_in
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.model.ranked_model import ranked_model
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.miles.arguments import check_dense, miles_arguments, parsed, sizes_of
from tinsmith_trainer.errors import ModelDirectoryInvalid, ServerError
from tinsmith_trainer.options import parse_options
from tinsmith_trainer.worker.engine_factories import build_on_ranks

SETTINGS = MegatronSettings(max_rank=8)


def of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_the_arguments_name_the_folder_and_the_sizes_of_the_model() -> None:
    model = tiny_model()
    arguments, sizes = arguments_of(model, SETTINGS, Parallelism()), sizes_of(model.directory)
    assert of(arguments, "--hf-checkpoint") == of(arguments, "--load") == str(model.directory)
    assert [of(arguments, f"--{name}") for name in ("num-layers", "hidden-size", "num-attention-heads")] == [
        str(sizes.layers),
        str(sizes.hidden),
        str(sizes.heads),
    ]
    assert float(of(arguments, "--norm-epsilon")) == sizes.norm_epsilon
    assert "--untie-embeddings-and-output-weights" in arguments


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_one_rollout_fills_a_batch_of_all_copies(copies: int) -> None:
    """Otherwise Miles has no step to schedule, and its actors do not start."""
    arguments = arguments_of(tiny_model(), SETTINGS, Parallelism(copies))
    of_a_rollout = int(of(arguments, "--rollout-batch-size")) * int(of(arguments, "--n-samples-per-prompt"))
    assert of_a_rollout * int(of(arguments, "--num-rollout")) == int(of(arguments, "--global-batch-size")) == copies


@pytest.mark.parametrize(
    ("recompute", "words"), [("layers", ["full"]), ("mlp", ["selective", "mlp"]), ("none", [])], ids=str
)
def test_layers_are_computed_again_as_the_settings_say(recompute: str, words: list[str]) -> None:
    settings = replace(SETTINGS, recompute=recompute)  # type: ignore[arg-type]
    said = " ".join(arguments_of(tiny_model(), settings, Parallelism()))
    assert ("--recompute" in said) == bool(words)
    assert all(word in said for word in words)


def test_a_mixture_of_experts_is_sent_to_nemo_rl_on_every_device() -> None:
    model = tiny_model("qwen3-moe")
    with pytest.raises(ModelDirectoryInvalid, match=r"a mixture of 8 experts.* Use the engine nemo-rl"):
        check_dense(ranked_model(model.directory, model.info, SETTINGS))
    needed = ["--model", str(model.directory), "--volume=v", "--socket=s", "--checkpoint-root=file:///c"]
    with pytest.raises(ModelDirectoryInvalid, match="a mixture of 8 experts"):
        build_on_ranks(parse_options([*needed, "--engine=miles", "--max-rank=8", "--no-sampling"]))


def test_a_layout_that_cannot_hold_the_model_is_refused() -> None:
    with pytest.raises(ModelDirectoryInvalid, match="key and value heads, which 8 tensor ranks cannot share"):
        arguments_of(tiny_model(), SETTINGS, Parallelism(8, tensor=8))


def test_a_family_that_says_its_sizes_otherwise_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelDirectoryInvalid, match=r"has no intermediate_size, which Miles requires: .* engine peft"):
        sizes_of(tmp_path)


def test_rotary_positions_of_a_base_that_is_not_a_whole_number_are_refused(tmp_path: Path) -> None:
    content = json.loads((tiny_model().directory / "config.json").read_text())
    content["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.5}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelDirectoryInvalid, match=r"rope_theta 10000\.5, but Miles supports only integers"):
        sizes_of(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "None"])
def test_a_model_in_a_type_that_ranks_do_not_train_in_is_refused(dtype: str) -> None:
    model = tiny_model()
    sizes = replace(sizes_of(model.directory), dtype=dtype)
    ranked = ranked_model(model.directory, model.info, SETTINGS)
    with pytest.raises(ModelDirectoryInvalid, match=rf"has dtype {dtype}, .* bfloat16 or float32\. Save the"):
        miles_arguments(ranked, sizes, Parallelism(), nodes=1)


def test_miles_parses_them_and_the_process_keeps_its_own() -> None:
    before = list(sys.argv)
    with stand_in():
        args = parsed(arguments_of(tiny_model(), SETTINGS, Parallelism()))
    assert args.use_distributed_optimizer
    assert args.target_modules[0] == "linear_q"
    assert sys.argv == before


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["--unheard-of"], "unrecognized arguments: --unheard-of"), ([], "num_epoch is not set")],
    ids=["argparse ends the process", "an assertion"],
)
def test_a_refusal_of_miles_is_one_sentence(arguments: list[str], why: str) -> None:
    with stand_in(), pytest.raises(ServerError, match=f"Miles refuses its arguments: .*{why}"):
        parsed(arguments)
