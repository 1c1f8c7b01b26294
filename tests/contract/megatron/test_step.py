"""The split train step is one arithmetic, however ranks share the model and the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.nemo_rl.joined_states import Played, assert_same_bits, assert_same_state, torch_step
from support.nemo_rl.megatron_training import (
    Backward,
    Create,
    Event,
    Forward,
    Layout,
    LayoutRanks,
    Read,
    Reload,
    Rig,
    Step,
    Write,
    accumulate,
    rows,
    run_schedule,
)
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RanksLost
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.torch_model.tiny_model import TinyShape

SHAPE = TinyShape(max_sequence_length=64, heads=8, kv_heads=4, intermediate_size=96, vocab_size=128)

FLOAT32_LAYOUTS: Mapping[str, Layout] = {
    "one": Layout(Parallelism()),
    "data2": Layout(Parallelism(world_size=2)),
    "data2-distributed": Layout(Parallelism(world_size=2, distributed_optimizer=True)),
    "data4": Layout(Parallelism(world_size=4)),
    "tensor2": Layout(Parallelism(world_size=2, tensor=2)),
    "pipeline2": Layout(Parallelism(world_size=2, pipeline=2)),
    "tensor2-data2-distributed": Layout(Parallelism(world_size=4, tensor=2, distributed_optimizer=True)),
}
BFLOAT16_LAYOUTS: Mapping[str, Layout] = {
    "bf16": Layout(Parallelism(), torch.bfloat16),
    "bf16-data2-distributed": Layout(Parallelism(world_size=2, distributed_optimizer=True), torch.bfloat16),
}
LAYOUTS = FLOAT32_LAYOUTS | BFLOAT16_LAYOUTS

# Three rows: data ranks get padding. Parameters change with each step; the second one clips. A great eps keeps Adam
# from making whole steps of gradients that are rounding errors, of which each layout has its own.
PARAMS = (
    AdamParams(1e-2, eps=1e-2, weight_decay=0.1),
    AdamParams(3e-3, beta1=0.8, beta2=0.99, eps=3e-2, grad_clip_norm=0.5),
    AdamParams(5e-3, beta1=0.0, eps=1e-2, weight_decay=0.01, grad_clip_norm=1e6),
)
TRAINING = (
    Create("a"),
    *(
        event
        for number, params in enumerate(PARAMS)
        for event in (
            Backward("a", (rows(3, 10 * number),)),
            Backward("a", (rows(4, 10 * number + 1), rows(1, 10 * number + 2))),
            Read("a"),
            Step("a", params),
        )
    ),
    Read("a"),
)


def _open(layout: Layout) -> LayoutRanks:
    return LayoutRanks(layout, tiny_directory("qwen3", SHAPE))


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def ranks(layout: str) -> Iterator[LayoutRanks]:
    with _open(LAYOUTS[layout]) as opened:
        yield opened


@pytest.fixture(scope="module")
def on_one_rank() -> Callable[[torch.dtype], Played]:
    """Return the results of the training without any division, by the parameters' type."""
    played: dict[torch.dtype, Played] = {}

    def play(dtype: torch.dtype) -> Played:
        if dtype not in played:
            with _open(Layout(Parallelism(), dtype)) as alone:
                played[dtype] = alone.play(*TRAINING)
        return played[dtype]

    return play


def test_norms_gradients_and_weights_are_those_of_one_rank(
    layout: str, ranks: LayoutRanks, on_one_rank: Callable[[torch.dtype], Played]
) -> None:
    played, alone = ranks.play(*TRAINING), on_one_rank(LAYOUTS[layout].dtype)
    close = 1e-4 if layout in FLOAT32_LAYOUTS else 2e-2
    assert played.norms == pytest.approx(alone.norms, rel=close)
    for read, wanted in zip(played.reads, alone.reads, strict=True):
        assert read.step == wanted.step
        for group in ("weights", "gradients"):
            torch.testing.assert_close(read.groups.get(group), wanted.groups.get(group), atol=close, rtol=close)


def test_a_step_is_torchs_adamw_on_the_sum_of_gradients(ranks: LayoutRanks) -> None:
    played = ranks.play(*TRAINING)
    before_and_after = zip(played.reads, played.reads[1:], strict=False)
    for params, norm, (before, after) in zip(PARAMS, played.norms, before_and_after, strict=True):
        wanted_norm, wanted = torch_step(before, params)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
        assert after.step == before.step + 1
        torch.testing.assert_close(dict(after.groups["weights"]), wanted, atol=1e-6, rtol=1e-5)


def test_a_calls_gradient_does_not_depend_on_earlier_calls_and_calls_are_summed(ranks: LayoutRanks) -> None:
    call, other = Backward("a", (rows(4, 1),)), Backward("a", (rows(3, 2),))
    still = Step("a", AdamParams(learning_rate=0.0, grad_clip_norm=0.1))
    program = (Create("a"), call, Read("a"), still, call, Read("a"), call, Read("a"), still, other, Read("a"))
    both = (still, Backward("a", (*call.calls, *other.calls)), Read("a"))
    first, again, twice, second, together = (
        dict(read.groups["gradients"]) for read in ranks.play(*program, *both).reads
    )
    for name, gradient in first.items():
        assert torch.equal(again[name], gradient), name
        assert torch.equal(twice[name], 2 * gradient), name
    sums = {name: gradient + second[name] for name, gradient in first.items()}
    torch.testing.assert_close(together, sums, atol=1e-5, rtol=1e-4)


def test_a_failed_call_leaves_no_trace(layout: str, ranks: LayoutRanks) -> None:
    begin, middle, end = rows(4, 1), rows(8, 2), rows(4, 3)
    whole = (Create("a"), Backward("a", (begin,)), Backward("a", (end,)), Read("a"), Step("a"), Read("a"))
    undisturbed = ranks.play(*whole)
    failures = [Backward("a", (begin, middle), fails_after=1)]
    if LAYOUTS[layout].parallelism.pipeline == 1:
        # Stages would wait for each other, as they do for one that died: their worker is restarted.
        failures.append(Backward("a", (middle,), fails_in=1))
    for failing in failures:
        assert_same_bits(ranks.play(*whole[:2], failing, *whole[2:]), undisturbed)


def test_hooks_are_back_after_success_and_failure_and_reduce_once_a_call(ranks: LayoutRanks) -> None:
    ranks.play(Create("a"))
    for hooks_are_back, reductions in ranks.ask(_watch_hooks):
        assert hooks_are_back
        assert reductions == {"after a call of two schedules": 1, "after a failed one": 1}


def _watch_hooks(rig: Rig) -> tuple[bool, dict[str, int]]:
    from megatron.core.distributed import finalize_model_grads

    config, reductions, counted = rig.ddp.config, [], {}

    def finalize(*args: Any, **kwargs: Any) -> None:
        reductions.append(args)
        finalize_model_grads(*args, **kwargs)

    config.finalize_model_grads_func, config.no_sync_func = finalize, rig.ddp.no_sync
    accumulate(rig, "a", lambda: [run_schedule(rig, rows(4, seed)) for seed in (1, 2)])
    counted["after a call of two schedules"] = len(reductions)
    with pytest.raises(ZeroDivisionError):
        accumulate(rig, "a", lambda: 1 / 0)
    counted["after a failed one"] = len(reductions)
    back = (config.finalize_model_grads_func, config.no_sync_func) == (finalize, rig.ddp.no_sync)
    config.finalize_model_grads_func = config.no_sync_func = None
    return back, counted


def test_adapters_that_take_turns_with_open_accumulators_are_as_if_alone(ranks: LayoutRanks) -> None:
    def life(adapter: str, seed: int) -> list[Any]:
        return [
            Create(adapter, rank=4),
            Backward(adapter, (rows(3, seed),)),
            Backward(adapter, (rows(4, seed + 1),)),
            Step(adapter, PARAMS[0]),
            Backward(adapter, (rows(2, seed + 2),)),
            Forward(adapter, rows(2, seed + 3)),
            Step(adapter, PARAMS[1]),
            Step(adapter, PARAMS[2]),
            Backward(adapter, (rows(2, seed + 4),)),
        ]

    lives = [life("a", 1), life("b", 20), life("c", 40)]
    together = ranks.play(*(event for turn in zip(*lives, strict=True) for event in turn), *map(Read, "abc"))
    alone = [ranks.play(*events, Read(adapter)) for adapter, events in zip("abc", lives, strict=True)]
    for read, own in zip(together.reads, alone, strict=True):
        assert_same_state(read, own.reads[0])
    assert together.norms[0::3] == alone[0].norms


TURNS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["backward", "step", "forward", "reload", "failing"])),
    min_size=2,
    max_size=8,
)


@pytest.mark.parametrize("layout", ["one"], indirect=True)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TURNS)
def test_each_adapter_trains_as_if_alone_for_any_order_of_turns(
    layout: str, ranks: LayoutRanks, turns: list[tuple[str, str]]
) -> None:
    events = [(adapter, _turn(adapter, kind, number)) for number, (adapter, kind) in enumerate(turns)]
    begin = (Create("a", rank=4), Create("b", rank=2))
    together = ranks.play(*begin, *(event for _, event in events), Read("a"), Read("b"))
    for adapter, created, read in zip("ab", begin, together.reads, strict=True):
        own = (event for of, event in events if of == adapter)
        assert_same_state(read, ranks.play(created, *own, Read(adapter)).reads[0])


def _turn(adapter: str, kind: str, seed: int) -> Event:
    return {
        "backward": Backward(adapter, (rows(1, seed),)),
        "step": Step(adapter, AdamParams(1e-2, grad_clip_norm=0.5)),
        "forward": Forward(adapter, rows(1, seed)),
        "reload": Reload(adapter),
        "failing": Backward(adapter, (rows(2, seed),), fails_in=1),
    }[kind]


def test_an_adapter_that_is_read_dropped_and_written_continues_bit_for_bit(ranks: LayoutRanks) -> None:
    begin = (Create("a"), Backward("a", (rows(4, 1),)), Step("a"), Step("a"), Backward("a", (rows(3, 2),)))
    rest = (Backward("a", (rows(2, 3),)), Step("a"), Read("a"))
    assert_same_bits(ranks.play(*begin, Reload("a"), *rest), ranks.play(*begin, *rest))
    fresh = (Create("a"), Backward("a", (rows(4, 1),)))
    assert_same_bits(ranks.play(*fresh, Reload("a"), Step("a"), Read("a")), ranks.play(*fresh, Step("a"), Read("a")))


def test_padding_of_the_rank_stays_zero(ranks: LayoutRanks) -> None:
    read = ranks.play(Create("a", rank=3), *TRAINING[1:]).reads[-1]
    for group in ("weights", "adam/exp_avg", "adam/exp_avg_sq"):
        for name, values in read.groups[group].items():
            padding = values[3:] if name.endswith("lora_A") else values[:, 3:]
            assert torch.count_nonzero(padding) == 0, (group, name)


def test_a_step_without_gradients_counts_and_decays(ranks: LayoutRanks) -> None:
    params = AdamParams(1e-2, weight_decay=0.5)
    played = ranks.play(Create("a"), Read("a"), Step("a", params), Read("a"))
    before, after = played.reads
    assert played.norms == [0.0]
    assert (after.step, set(before.groups), set(after.groups)) == (
        1,
        {"weights"},
        {"weights", "adam/exp_avg", "adam/exp_avg_sq"},
    )
    wanted = {name: values * (1 - 1e-2 * 0.5) for name, values in before.groups["weights"].items()}
    torch.testing.assert_close(dict(after.groups["weights"]), wanted, atol=1e-7, rtol=1e-6)


def test_a_refused_step_costs_at_most_the_accumulator(ranks: LayoutRanks) -> None:
    trained = (Create("a"), Backward("a", (rows(4, 1),)), Step("a"))
    end = (Backward("a", (rows(4, 3),)), Step("a"), Read("a"))
    endless = (
        Backward("a", (rows(4, 2, scale=float("inf")),)),
        Step("a", refused="the gradient's norm is (nan|inf)"),
    )
    senseless = Step("a", AdamParams(learning_rate=-1.0), refused="learning_rate is -1.0")
    undisturbed = ranks.play(*trained, *end)
    assert_same_bits(ranks.play(*trained, *endless, *end), undisturbed)
    assert_same_bits(ranks.play(*trained, end[0], senseless, *end[1:]), undisturbed)


def test_gradients_can_be_cleared_and_an_adapter_dropped(ranks: LayoutRanks) -> None:
    ranks.play(Create("a"), Backward("a", (rows(2, 1),)))
    assert all("gradients" not in groups for groups in ranks.ask(_clear))
    assert all("Adapter a is not loaded" in said for said in ranks.ask(_drop))


def _clear(rig: Rig) -> set[str]:
    rig.step.clear_gradients("a")
    return set(rig.step.read("a").groups)


def _drop(rig: Rig) -> str:
    rig.step.drop("a")
    rig.step.drop("a")
    with pytest.raises(ServerError) as raised:
        rig.step.read("a")
    return str(raised.value)


@pytest.mark.parametrize("layout", ["one"], indirect=True)
def test_tensors_that_are_not_this_ranks_are_refused_and_change_nothing(layout: str, ranks: LayoutRanks) -> None:
    assert ranks.play(Create("a"), Backward("a", (rows(2, 1),)), Step("a")).norms
    [(said, unchanged)] = ranks.ask(_write_wrongly)
    assert ["got nothing" in said[0], "got [1, 1]" in said[1], "does not train model.other" in said[2]] == [True] * 3
    assert unchanged


def _write_wrongly(rig: Rig) -> tuple[list[str], bool]:
    before = rig.step.read("a")
    weights = before.groups["weights"]
    first = min(weights)
    wrong = (
        {name: values for name, values in weights.items() if name != first},
        {**weights, first: torch.zeros(1, 1)},
        {**weights, "model.other": torch.zeros(1, 1)},
    )
    said = []
    for groups in wrong:
        with pytest.raises(ServerError) as raised:
            rig.step.create("a", groups)
        said.append(str(raised.value))
    after = rig.step.read("a").groups["weights"]
    return said, all(torch.equal(after[name], values) for name, values in weights.items())


@pytest.mark.parametrize("layout", ["one"], indirect=True)
def test_a_step_that_fails_halfway_costs_the_ranks(layout: str, ranks: LayoutRanks) -> None:
    ranks.play(Create("a"))
    with pytest.raises(RanksLost, match="after it began to change weights: out of memory"):
        ranks.ask(_fail_halfway)


def _fail_halfway(rig: Rig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", _out_of_memory)
        rig.step.optim_step("a", AdamParams(1e-2))


def _out_of_memory(*_: Any) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("layout", BFLOAT16_LAYOUTS, indirect=True)
def test_16_bit_weights_follow_float32_masters(layout: str, ranks: LayoutRanks) -> None:
    ranks.play(Create("a"), Backward("a", (rows(4, 1),)), Step("a", AdamParams(1e-4)))
    assert all(follows and finer for follows, finer in ranks.ask(_compare_masters))


def _compare_masters(rig: Rig) -> tuple[bool, bool]:
    masters = rig.step.read("a").groups["weights"]
    follows = all(torch.equal(one.parameter, masters[one.name].bfloat16()) for one in rig.tensors)
    finer = any(not torch.equal(masters[one.name].bfloat16().float(), masters[one.name]) for one in rig.tensors)
    return follows, finer


@pytest.mark.parametrize(
    ("source", "target", "close"),
    [("data2-distributed", "one", 1e-6), ("data2", "tensor2", 1e-5), ("one", "data4", 1e-5)],
)
def test_an_adapter_continues_in_another_layout(source: str, target: str, close: float) -> None:
    step = Step("a", PARAMS[0])
    begin = (Create("a"), Backward("a", (rows(4, 1),)), step, step, Backward("a", (rows(3, 2),)))
    rest = (Backward("a", (rows(2, 3),)), step, Read("a"))
    with _open(LAYOUTS[source]) as first:
        there = first.play(*begin, Read("a"))
        stayed = first.play(*begin, *rest)
    moved_state = there.reads[0]
    with _open(LAYOUTS[target]) as second:
        moved = second.play(Write("a", moved_state.step, moved_state.groups), *rest)
    assert moved.norms == pytest.approx(stayed.norms[2:], rel=1e-5)
    for group, tensors in stayed.reads[0].groups.items():
        torch.testing.assert_close(dict(moved.reads[0].groups[group]), dict(tensors), atol=close, rtol=1e-5)
