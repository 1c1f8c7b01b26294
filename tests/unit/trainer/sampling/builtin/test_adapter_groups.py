from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sampler.jobs import random_adapter
from tinsmith_trainer.sampling.builtin.adapter_groups import (
    AdapterGroups,
    GroupLayout,
    GroupProducts,
    GroupWeights,
    StackMemory,
)
from tinsmith_trainer.sampling.builtin.adapters import (
    BASE_MODEL,
    AdapterRun,
    LoadedAdapter,
    load_adapter,
    route_by_products,
)
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import apply_delta

CPU = torch.device("cpu")

UNEMBED = "lm_head"
ROOMY = 1 << 30

runs_of_numbers = st.lists(st.integers(1, 6), min_size=1, max_size=6).flatmap(
    lambda counts: st.permutations(range(6)).map(lambda numbers: list(zip(numbers, counts, strict=False)))
)
"""Which adapter, and how many rows."""


def loaded(model: TorchModel, rank: int, seed: int) -> LoadedAdapter:
    state = random_adapter(model, rank=rank, seed=seed, families=("unembed",))
    return load_adapter(f"seed-{seed}", state, model.layers, model.device)


@pytest.fixture(scope="module")
def adapters(model: TorchModel) -> list[LoadedAdapter]:
    """Return adapters of different ranks and of one shape."""
    return [loaded(model, rank, seed=rank) for rank in range(2, 8)]


def groups_with(most_bytes: int) -> AdapterGroups:
    return of_a_batch(StackMemory(most_bytes))


def of_a_batch(memory: StackMemory) -> AdapterGroups:
    """Return the groups of a batch that has samples."""
    groups = AdapterGroups(memory)
    groups.is_idle = False
    return groups


def grouped(groups: AdapterGroups, runs: list[AdapterRun]) -> bool:
    return isinstance(groups.route(runs, [UNEMBED])[UNEMBED], GroupProducts)


@given(st.lists(runs_of_numbers, min_size=1, max_size=5))
def test_groups_compute_the_same_as_products_of_runs_while_adapters_change(
    model: TorchModel, adapters: list[LoadedAdapter], steps: list[list[tuple[int, int]]]
) -> None:
    groups, base = groups_with(ROOMY), model.layers[UNEMBED].base
    for step in steps:
        runs = [(adapters[number], rows) for number, rows in step]
        x = torch.randn(sum(rows for _, rows in runs), 1, base.in_features)
        found, expected = (
            apply_delta(x, base, route[UNEMBED])
            for route in (groups.route(runs, [UNEMBED]), route_by_products(runs, [UNEMBED]))
        )
        torch.testing.assert_close(found, expected)


def test_a_base_of_bfloat16_keeps_its_type(model: TorchModel, adapters: list[LoadedAdapter]) -> None:
    base = torch.nn.Linear(64, 512, bias=False, dtype=torch.bfloat16)
    x = torch.randn(4, 1, 64, dtype=torch.bfloat16)
    runs = [(adapters[0], 2), (adapters[1], 2)]
    found, expected = (
        apply_delta(x, base, route[UNEMBED])
        for route in (groups_with(ROOMY).route(runs, [UNEMBED]), route_by_products(runs, [UNEMBED]))
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_an_adapter_is_copied_when_it_comes_and_stays_where_it_is(
    adapters: list[LoadedAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c, d = adapters[:4]
    copied: list[int] = []
    put = GroupWeights.put
    monkeypatch.setattr(GroupWeights, "put", lambda self, group, delta: (copied.append(group), put(self, group, delta)))
    groups = groups_with(ROOMY)
    for runs in ([a, b, c], [a, c], [a, c, d], [c, d]):
        groups.route([(adapter, 2) for adapter in runs], [UNEMBED])
    assert copied == [0, 1, 2, 1]


def test_rows_that_lie_in_equal_groups_are_taken_as_they_are() -> None:
    assert GroupLayout.of([(0, 4), (1, 4)], 2, CPU).order is None
    assert GroupLayout.of([(1, 4), (0, 4)], 2, CPU).order is not None
    assert GroupLayout.of([(0, 4), (1, 3)], 2, CPU).order is not None


def test_adapters_that_do_not_fit_a_stack_are_computed_separately(
    model: TorchModel, adapters: list[LoadedAdapter]
) -> None:
    a, b = adapters[:2]
    of_rank_20 = loaded(model, 20, seed=20)
    assert grouped(groups_with(ROOMY), [(a, 2), (b, 2)])
    assert not grouped(groups_with(ROOMY), [(a, 4)]), "one adapter has one product"
    assert not grouped(groups_with(ROOMY), [(a, 2), (of_rank_20, 2)]), "of unlike shapes"
    assert not grouped(groups_with(ROOMY), [(a, 2), (BASE_MODEL, 2)])
    assert not grouped(groups_with(2 * a.nbytes - 1), [(a, 2), (b, 2)]), "too large to copy"
    assert not grouped(groups_with(ROOMY), [(one, rows) for one, rows in zip(adapters, [9, 1, 1, 1], strict=False)])


def test_batches_share_the_memory_for_stacks_and_an_unused_stack_makes_room(adapters: list[LoadedAdapter]) -> None:
    a, b, c, d = adapters[:4]
    memory = StackMemory(3 * a.nbytes)
    first, second = of_a_batch(memory), of_a_batch(memory)
    assert grouped(first, [(a, 2), (b, 2)])
    assert not grouped(second, [(c, 2), (d, 2)])
    first.is_idle = True
    assert not grouped(second, [(c, 2), (d, 2)]), "equal runs keep their route"
    assert grouped(second, [(c, 3), (d, 3)])
    assert first.nbytes == 0
    first.is_idle = False
    assert not grouped(first, [(a, 2), (b, 2)]), "its stack is gone"
    grouped(second, [(c, 6)])
    assert grouped(first, [(a, 3), (b, 3)]), "one adapter needs no stack"
    assert second.nbytes == 0
