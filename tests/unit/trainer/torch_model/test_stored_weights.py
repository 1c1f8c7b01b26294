"""A directory is served if its files hold the weights of its architecture: all, of its shapes, and no others."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import TIED, tiny_directory
from support.tiny_vision import vision_directory
from support.zoo.families import family_directory
from support.zoo.stored_formats import make
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.sampling.token_server.served_model import read_model
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.stored_weights import checked_config

Tensors = dict[str, torch.Tensor]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"
SECOND_SHARD = "model-00002-of-00002.safetensors"


def copy_of(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to / "model"))


def change(directory: Path, edit: Callable[[Tensors], object], file: str = WEIGHTS) -> None:
    tensors = load_file(directory / file)
    edit(tensors)
    save_file(tensors, directory / file, {"format": "pt"})


def set_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(directory: Path) -> None:
    """Split the weights into two files, the second with the second layer."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = {name: SECOND_SHARD if ".layers.1." in name else "model-00001-of-00002.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, directory / file, {"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def refused(directory: Path) -> str:
    with pytest.raises(ModelDirectoryInvalid) as caught:
        checked_config(directory)
    assert str(directory) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda t: t.pop(QUERY), rf"1 missing \({QUERY}\)", id="missing"),
        pytest.param(lambda t: t.pop("lm_head.weight"), r"1 missing \(lm_head\.weight\)", id="untied-head"),
        pytest.param(
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            r"1 that it does not have \(model\.layers\.0\.self_attn\.q_proj\.bias\)",
            id="unexpected",
        ),
        pytest.param(
            lambda t: t.update({QUERY: t[QUERY][:-8].clone()}),
            rf"1 of another shape \({QUERY}: \[.*\], not",
            id="shape",
        ),
        pytest.param(
            lambda t: [t.pop(name) for name in list(t) if ".layers.0." in name],
            r"11 missing \(.* and 6 more\)",
            id="many",
        ),
        pytest.param(
            lambda t: t.update({QUERY.replace("q_proj", "query"): t.pop(QUERY)}),
            r"1 missing \(.*q_proj.*1 that it does not have \(.*query",
            id="renamed",
        ),
    ],
)
def test_the_tensors_that_differ_are_named(edit: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(), tmp_path)
    change(directory, edit)
    assert re.search(message, refused(directory))


def test_every_loader_refuses_a_checkpoint_that_lacks_a_tensor(tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(), tmp_path)
    change(directory, lambda tensors: tensors.pop(QUERY))
    for load in (load_torch_model, read_model):
        with pytest.raises(ModelDirectoryInvalid, match=QUERY):
            load(str(directory))


def test_a_shard_without_a_tensor_that_the_index_lists_is_named(tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(), tmp_path)
    shard(directory)
    change(directory, lambda tensors: tensors.pop(QUERY), SECOND_SHARD)
    assert f"{SECOND_SHARD} lacks tensors that {INDEX} lists for it: {QUERY}." in refused(directory)


def list_in_index(directory: Path, *names: str) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(names, SECOND_SHARD)
    (directory / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.rotary_emb.inv_freq", "score.weight"])
def test_an_index_may_list_a_tensor_that_the_architecture_does_not_need(name: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(shape=TIED), tmp_path)
    shard(directory)
    list_in_index(directory, name)
    checked_config(directory)
    change(directory, lambda tensors: tensors.pop(QUERY), SECOND_SHARD)
    assert f"lists for it: {QUERY}." in refused(directory)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(), tmp_path)
    shard(directory)
    (directory / SECOND_SHARD).unlink()
    assert f"names files that are missing: {SECOND_SHARD}." in refused(directory)


@pytest.mark.parametrize(
    "edit",
    [lambda head: head + 1, lambda head: head.bfloat16(), lambda head: head[:-8].clone()],
    ids=["values", "type", "shape"],
)
def test_a_tensor_in_two_shards_is_named(edit: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(), tmp_path)
    head = load_file(directory / WEIGHTS)["lm_head.weight"]
    shard(directory)
    change(directory, lambda tensors: tensors.update({"lm_head.weight": edit(head)}), SECOND_SHARD)
    assert "both hold the tensor lm_head.weight" in refused(directory)


def test_weights_that_torch_has_pickled_are_held_to_the_same(tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(), tmp_path)
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    checked_config(directory)
    tensors.pop(QUERY)
    torch.save(tensors, directory / "pytorch_model.bin")
    assert QUERY in refused(directory)


def test_a_pickle_holds_a_tied_head_twice_and_may_not_hold_two(tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(shape=TIED), tmp_path)
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    embedding = tensors["model.embed_tokens.weight"]
    torch.save({**tensors, "lm_head.weight": embedding}, directory / "pytorch_model.bin")
    checked_config(directory)
    torch.save(
        {**tensors, "lm_head.weight": embedding + 1},
        directory / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )
    assert "ties lm_head.weight to model.embed_tokens.weight" in refused(directory)


def expert(number: int, part: str = "down_proj") -> str:
    return f"model.layers.1.mlp.experts.{number}.{part}.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda t: [t.pop(expert(1, f"{p}_proj")) for p in ("gate", "up", "down")], expert(1), id="middle"),
        pytest.param(lambda t: t.pop(expert(7, "gate_proj")), expert(7, "gate_proj"), id="a-part-of-the-last"),
        pytest.param(
            lambda t: [t.pop(expert(7, f"{p}_proj")) for p in ("gate", "up", "down")],
            "model.layers.1.mlp.experts.down_proj: [7, ",
            id="last",
        ),
        pytest.param(lambda t: t.update({expert(2): t[expert(2)][:-8].clone()}), f"{expert(2)}: [", id="shape"),
        pytest.param(
            lambda t: [
                t.update({expert(8, f"{p}_proj"): t.pop(expert(2, f"{p}_proj"))}) for p in ("gate", "up", "down")
            ],
            expert(2),
            id="as-many-under-other-numbers",
        ),
    ],
)
def test_an_expert_that_is_not_there_is_named(edit: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_directory("qwen3-moe"), tmp_path)
    change(directory, edit)
    assert message in refused(directory)


def test_a_head_that_config_json_ties_and_the_files_hold_apart_is_refused(tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(shape=TIED), tmp_path)
    embedding = load_file(directory / WEIGHTS)["model.embed_tokens.weight"]
    change(directory, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    checked_config(directory)
    change(directory, lambda tensors: tensors.update({"lm_head.weight": embedding + 0.5}))
    message = refused(directory)
    assert "ties lm_head.weight to model.embed_tokens.weight" in message
    assert "Set tie_word_embeddings to false" in message


def test_no_other_name_of_a_tied_head_holds_other_values(tmp_path: Path) -> None:
    directory = copy_of(vision_directory("gemma3"), tmp_path)
    text = json.loads((directory / "config.json").read_text())["text_config"]
    set_config(directory, tie_word_embeddings=True, text_config={**text, "tie_word_embeddings": True})
    [embedding] = [t for name, t in load_file(directory / WEIGHTS).items() if name.endswith("embed_tokens.weight")]
    heads = {"lm_head.weight": embedding.clone(), "language_model.lm_head.weight": embedding.clone()}
    change(directory, lambda tensors: tensors.update(heads))
    checked_config(directory)
    for name in heads:
        change(directory, lambda tensors, name=name: tensors.update({**heads, name: embedding + 0.5}))
        assert f"ties {name} to" in refused(directory)


def test_a_layer_that_predicts_further_tokens_may_have_its_own_head_in_a_tied_model(tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(shape=TIED), tmp_path)
    change(directory, lambda tensors: tensors.update({"mtp.lm_head.weight": torch.ones(512, 64)}))
    checked_config(directory)


@pytest.mark.parametrize(
    ("method", "lost"),
    [
        ("fp8", "model.layers.1.self_attn.o_proj.weight_scale_inv"),
        ("fp8", "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"),
        ("fp8", "model.layers.1.mlp.experts.2.up_proj.weight"),
        ("mxfp4", "model.layers.1.mlp.experts.down_proj_scales"),
        ("mxfp4", "model.layers.1.mlp.experts.gate_up_proj_blocks"),
    ],
)
def test_a_part_of_a_quantized_weight_is_missed(method: str, lost: str, tmp_path: Path) -> None:
    directory, _ = make(method, tmp_path)
    checked_config(directory)
    change(directory, lambda tensors: tensors.pop(lost))
    assert lost in refused(directory)


@pytest.mark.parametrize(
    "extra",
    [
        "mtp.layers.0.mlp.up_proj.weight",
        "model.mtp.norm.weight",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rope.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "model.layers.1.self_attn.rotary_emb.sin_cached",
        "model.layers.1.self_attn.k_scale",
        "model.layers.1.self_attn.v_scale",
    ],
)
def test_files_may_contain_tensors_that_no_model_uses(extra: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(), tmp_path)
    change(directory, lambda tensors: tensors.update({extra: torch.ones(8)}))
    checked_config(directory)


@pytest.mark.parametrize("ending", ["activation_scale", "input_scale"])
def test_scales_of_fp8_activations_may_lie_in_the_files(ending: str, tmp_path: Path) -> None:
    directory, _ = make("fp8", tmp_path)
    change(directory, lambda tensors: tensors.update({f"model.layers.1.self_attn.o_proj.{ending}": torch.tensor(1.0)}))
    checked_config(directory)


@pytest.mark.parametrize("extra", ["v_head.summary.weight", "model.layers.1.self_attn.q_scale_head.weight"])
def test_a_tensor_that_the_architecture_does_not_have_can_be_removed(extra: str, tmp_path: Path) -> None:
    directory = copy_of(tiny_directory(), tmp_path)
    change(directory, lambda tensors: tensors.update({extra: torch.ones(8)}))
    assert f"({extra})" in refused(directory)
    assert "A tensor that the model was trained without can be removed from its file." in refused(directory)
    change(directory, lambda tensors: tensors.pop(extra))
    checked_config(directory)


def test_declared_layers_that_predict_further_tokens_may_lie_in_the_files(tmp_path: Path) -> None:
    directory = copy_of(family_directory("deepseek_v3"), tmp_path)
    change(directory, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(8)}))
    set_config(directory, num_nextn_predict_layers=1)
    checked_config(directory)
    set_config(directory, num_nextn_predict_layers=0)
    assert "model.layers.2.eh_proj.weight" in refused(directory)
