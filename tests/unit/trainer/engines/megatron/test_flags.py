"""The flags of ranks: what they come to, and what contradicts itself is refused by a sentence."""

from __future__ import annotations

import pytest
from tinsmith_trainer.engines.megatron.flags import RankPlacement, rank_placement, rank_recompute
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.options import UsageError, WorkerOptions, parse_options

NEEDED = ("--model=m", "--socket=s", "--volume=v", "--checkpoint-root=file:///c")


def parsed(*flags: str) -> WorkerOptions:
    return parse_options([*NEEDED, *flags])


def placement(*flags: str) -> RankPlacement:
    return rank_placement("nemo-rl", parsed("--engine=nemo-rl", *flags))


def test_ranks_are_processes_on_cpus_that_flags_divide() -> None:
    found = placement(
        "--ranks=8", "--tensor-parallel=2", "--pipeline-parallel=2", "--distributed-optimizer", "--nodes=2"
    )
    assert found.parallelism == Parallelism(8, tensor=2, pipeline=2, distributed_optimizer=True)
    assert found.parallelism.data == 2
    assert (found.in_process, found.nodes, found.gpus_per_node) == (False, 2, 0)


def test_the_log_has_the_number_the_division_and_the_place_of_the_ranks() -> None:
    division = {"tensor": 2, "pipeline": 1, "context": 1, "data": 2, "nodes": 1}
    flags = ("--ranks=4", "--tensor-parallel=2")
    assert placement(*flags).described() == {"ranks": 4, **division, "where": "Ray in this container"}
    assert placement(*flags, "--ray-address=head:6379").described()["where"] == "Ray at head:6379"
    assert placement().described()["where"] == "this process"
    assert placement("--nodes=2", "--gpus-per-node=8", "--no-sampling").described()["gpus_per_node"] == 8


def test_layers_are_recomputed_on_gpus_only_by_default() -> None:
    by_itself = [rank_recompute(None, on_gpus=on_gpus) for on_gpus in (True, False)]
    assert by_itself == ["layers", "none"]
    assert [rank_recompute("auto", on_gpus=on_gpus) for on_gpus in (True, False)] == by_itself
    said = parsed("--engine=nemo-rl", "--recompute=mlp").recompute
    assert rank_recompute(said, on_gpus=True) == rank_recompute(said, on_gpus=False) == "mlp"


@pytest.mark.parametrize("ranks", [(), ("--ranks=16",)], ids=["implied", "said"])
def test_every_gpu_has_one_rank(ranks: tuple[str, ...]) -> None:
    found = placement("--nodes=2", "--gpus-per-node=8", "--context-parallel=2", "--no-sampling", *ranks)
    assert found.parallelism == Parallelism(16, context=2)
    assert not found.in_process


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--engine=peft", "--ranks=2"), "--ranks: only nemo-rl and miles have ranks"),
        (("--distributed-optimizer", "--nodes=1"), "--distributed-optimizer, --nodes: only nemo-rl and miles"),
        (("--engine=nemo-rl", "--ranks=3", "--tensor-parallel=2"), "^--tensor-parallel 2 .* give --ranks 2 or 4$"),
        (("--engine=nemo-rl", "--ranks=2", "--tensor-parallel=2", "--pipeline-parallel=2"), "give --ranks 4$"),
        (("--engine=nemo-rl", "--tensor-parallel=2"), "^--tensor-parallel 2 .* without --ranks .* give --ranks 2$"),
        (("--engine=nemo-rl", "--gpus-per-node=8", "--tensor-parallel=3"), "8 GPUs .* must divide 8$"),
        (("--engine=nemo-rl", "--ranks=2", "--tensor-parallel=0"), "^--tensor-parallel 0: it must be at least 1$"),
        (("--engine=nemo-rl", "--ranks=-1"), "cannot be negative"),
        (("--engine=nemo-rl", "--ray-address=h:6379"), "need several ranks"),
        (("--engine=nemo-rl", "--ranks=4", "--context-parallel=2"), "needs GPUs"),
        (("--engine=nemo-rl", "--context-parallel=2"), "needs GPUs"),
        (("--engine=nemo-rl", "--expert-parallel=2"), "Experts cannot be divided among 2 ranks"),
        (("--engine=miles", "--gpus-per-node=8", "--no-sampling", "--context-parallel=2"), "use nemo-rl$"),
        (("--engine=miles", "--ranks=3", "--expert-parallel=3"), "does not train mixtures of experts; use nemo-rl$"),
        (("--engine=nemo-rl", "--rank=2"), "unrecognized arguments: --rank=2"),
        (
            ("--engine=nemo-rl", "--ranks=3", "--nodes=2"),
            "evenly over --nodes 2: give --ranks 2 or 4$",
        ),
        (("--engine=nemo-rl", "--ranks=4", "--gpus-per-node=8"), "one rank per GPU: omit --ranks, or give 8$"),
        (("--engine=nemo-rl", "--gpus-per-node=8"), "--no-sampling"),
    ],
)
def test_impossible_flags_are_refused_with_one_sentence(flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parsed(*flags)
