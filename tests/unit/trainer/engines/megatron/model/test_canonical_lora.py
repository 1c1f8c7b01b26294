from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nemo_rl.bridge import PARTS, Adapted, Adapter
from support.nemo_rl.fakes import PEFT_ARGUMENTS, CanonicalLoRA, fake_modules
from tinsmith_trainer.engines.megatron.model.canonical_lora import find_lora
from tinsmith_trainer.engines.megatron.model.lora import COLUMNS, ROWS
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.step.tensor_parts import cut, join, whole_shapes
from tinsmith_trainer.engines.nemo_rl.worker import canonical_lora_in
from tinsmith_trainer.errors import ModelDirectoryInvalid
from torch import nn

HIDDEN, INNER, HEADS, KV, VOCAB = 16, 24, 16, 8, 64


class Layer(nn.Module):
    """A stage's layer on one of `tensor` ranks: it knows its number in the whole model, from 1."""

    def __init__(self, number: int, dim: int, tensor: int) -> None:
        super().__init__()
        self.layer_number = number
        self.self_attention = nn.Module()
        self.self_attention.linear_qkv = fused("linear_qkv", (HEADS, KV, KV), dim, tensor)
        self.self_attention.linear_proj = row_parallel(HEADS, HIDDEN, dim, tensor)
        self.mlp = nn.Module()
        self.mlp.linear_fc1 = fused("linear_fc1", (INNER, INNER), dim, tensor)
        self.mlp.linear_fc2 = row_parallel(INNER, HIDDEN, dim, tensor)


def column_parallel(out: int, dim: int, tensor: int) -> Adapter:
    """Divide the adapter as ParallelLinearAdapter does: its middle among the ranks, then its output."""
    adapter = Adapter(HIDDEN, out // tensor, dim, input_is_parallel=False)
    adapter.linear_in = nn.Linear(HIDDEN, dim // tensor, bias=False)
    return adapter


def row_parallel(features: int, out: int, dim: int, tensor: int) -> Adapted:
    adapter = Adapter(features // tensor, out // tensor, dim, input_is_parallel=True)
    return Adapted(nn.Identity(), adapter)


def fused(name: str, outs: tuple[int, ...], dim: int, tensor: int) -> Adapted:
    adapters = {part: column_parallel(out, dim, tensor) for part, out in zip(PARTS[name], outs, strict=True)}
    return Adapted(nn.Identity(), nn.ModuleDict(adapters))


def stage(first: int, layers: int, dim: int = 8, tensor: int = 1) -> nn.Module:
    """Return a stage as a worker has it: in two wrappers, the last stage with its unembedding."""
    gpt = nn.Module()
    gpt.decoder = nn.Module()
    gpt.decoder.layers = nn.ModuleList(Layer(first + i, dim, tensor) for i in range(layers))
    gpt.output_layer = Adapted(nn.Identity(), column_parallel(VOCAB, dim, tensor))
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module.module = gpt
    return wrapped


PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HEADS),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HEADS, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}


def test_every_projection_has_the_name_and_the_whole_shape_that_peft_gives_it() -> None:
    found = {tensor.name: tensor.full_shape for tensor in find_lora(stage(1, 2), tensor_ranks=1).tensors}
    modules = {f"model.layers.{layer}.{name}": sizes for layer in (0, 1) for name, sizes in PROJECTIONS.items()}
    modules["lm_head"] = (HIDDEN, VOCAB)
    expected = {f"{name}.lora_A": (8, given) for name, (given, _) in modules.items()}
    expected |= {f"{name}.lora_B": (out, 8) for name, (_, out) in modules.items()}
    assert found == expected
    assert list(found) == sorted(found)


@given(tensor=st.sampled_from([1, 2, 4, 8]), first=st.integers(1, 40))
def test_a_ranks_parts_make_whole_tensors_again_and_layers_keep_their_number(tensor: int, first: int) -> None:
    for one in find_lora(stage(first, 1, tensor=tensor), tensor_ranks=tensor).tensors:
        assert one.split in (ROWS, COLUMNS)
        part = list(one.parameter.shape)
        part[one.split] *= tensor
        assert tuple(part) == one.full_shape
        assert one.name.startswith(("lm_head.", f"model.layers.{first - 1}."))


@given(tensor=st.sampled_from([1, 2, 4, 8]), rank=st.integers(1, 8), seed=st.integers(0, 2**20))
def test_an_adapter_that_was_cut_for_the_ranks_is_whole_again_when_it_is_joined(
    tensor: int, rank: int, seed: int
) -> None:
    """The rank may be any up to the padded one, although tensor ranks divide the padded rows of A."""
    parts = tuple(one.part() for one in find_lora(stage(1, 1, tensor=tensor), tensor_ranks=tensor).tensors)
    modules = sorted({part.name.rpartition(".")[0] for part in parts})
    shapes = whole_shapes([parts], modules, rank)
    draw = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    parallelism = Parallelism(tensor, tensor=tensor)
    held = [cut(whole, parts, parallelism.coordinates(at)) for at in range(tensor)]
    joined = join(held, [parts] * tensor, parallelism, shapes)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], values) for name, values in whole.items())


def test_only_under_row_parallel_layers_is_a_divided_by_its_columns() -> None:
    splits = {tensor.name: tensor.split for tensor in find_lora(stage(1, 1), tensor_ranks=1).tensors}
    by_columns = {name for name, split in splits.items() if split == COLUMNS}
    assert by_columns == {"model.layers.0.self_attn.o_proj.lora_A", "model.layers.0.mlp.down_proj.lora_A"}


def test_a_layer_without_a_name_in_pefts_layout_is_refused_by_name() -> None:
    model = stage(1, 1)
    layer = model.get_submodule("module.module.decoder.layers.0.mlp")
    layer.experts = nn.Module()
    layer.experts.linear_fc1 = row_parallel(INNER, HIDDEN, 8, 1)
    with pytest.raises(ModelDirectoryInvalid, match=r"layers\.0\.mlp\.experts\.linear_fc1"):
        find_lora(model, tensor_ranks=1)


def mixture_stage(first: int, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return a layer of the second of two ranks that share 6 experts, as the bridge names its modules."""
    for name, module in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    model = stage(first, 1)
    mlp: Any = model.get_submodule("module.module.decoder.layers.0.mlp")
    del mlp.linear_fc1, mlp.linear_fc2
    mlp.experts = nn.Module()
    mlp.experts.config = SimpleNamespace(num_moe_experts=6, hidden_size=HIDDEN, moe_ffn_hidden_size=INNER)
    mlp.experts.ep_group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    mlp.experts.linear_fc1 = nn.Linear(HIDDEN, 2 * INNER, bias=False, dtype=torch.bfloat16)
    mlp.experts.linear_fc2 = nn.Linear(INNER, HIDDEN, bias=False, dtype=torch.bfloat16)
    setup: Any = SimpleNamespace(LoRA=None)
    with canonical_lora_in(setup):
        assert setup.LoRA(**PEFT_ARGUMENTS).transform(mlp.experts, "experts", "decoder.layers.0.mlp") is mlp.experts
    return model


def test_experts_have_the_names_shapes_and_parts_that_the_peft_engine_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora = find_lora(mixture_stage(4, monkeypatch), tensor_ranks=1)
    found = {tensor.name: tensor for tensor in lora.tensors if ".mlp." in tensor.name}
    of_layer = "model.layers.3.mlp.experts"
    shapes = {"w1": ((1, 8, HIDDEN), (6, INNER, 8)), "w2": ((6, 8, INNER), (1, HIDDEN, 8))}
    shapes["w3"] = shapes["w1"]
    expected = {f"{of_layer}.{key}.lora_{factor}" for key in shapes for factor in "AB"}
    assert found.keys() == expected
    for key, whole in shapes.items():
        for factor, shape in zip("AB", whole, strict=True):
            tensor = found[f"{of_layer}.{key}.lora_{factor}"]
            assert tensor.full_shape == shape
            assert tensor.among == ("expert" if shape[0] == 6 else "tensor")
            assert tuple(tensor.parameter.shape) == (min(shape[0], 3), *shape[1:])
            assert tensor.parameter.dtype == torch.bfloat16


def test_the_bridge_sees_only_adapters_as_trained_parameters_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names decide it. A trained base would leave recomputed layers without gradients."""
    mlp = mixture_stage(1, monkeypatch).get_submodule("module.module.decoder.layers.0.mlp")
    names = {name for name, parameter in mlp.named_parameters() if ".linear_" not in name}
    assert names == {f"experts.adapter.{key}_{factor}" for key in ("w1", "w2", "w3") for factor in "AB"}


def test_a_dense_models_modules_are_the_bridges_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    setup: Any = SimpleNamespace(LoRA=None)
    with canonical_lora_in(setup):
        lora = setup.LoRA(**{**PEFT_ARGUMENTS, "target_modules": ["linear_q"]})
    experts = nn.Linear(2, 2)
    assert lora.transform(experts, "experts", "decoder.layers.0.mlp") is experts
    assert not hasattr(experts, "adapter")


def test_a_worker_made_inside_gets_an_adapter_for_each_projection_and_one_made_outside_the_stock_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, module in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    stock = object()
    setup: Any = SimpleNamespace(LoRA=stock)
    with canonical_lora_in(setup):
        lora = setup.LoRA(**PEFT_ARGUMENTS)
    assert setup.LoRA is stock
    assert isinstance(lora, CanonicalLoRA)
    assert (lora.dim, lora.alpha, lora.dropout) == (PEFT_ARGUMENTS["dim"], PEFT_ARGUMENTS["alpha"], 0.0)
    assert lora.target_modules == PEFT_ARGUMENTS["target_modules"]


def test_the_stock_one_is_back_also_when_a_worker_could_not_be_made() -> None:
    stock = object()
    setup: Any = SimpleNamespace(LoRA=stock)
    with pytest.raises(RuntimeError), canonical_lora_in(setup):
        raise RuntimeError
    assert setup.LoRA is stock
