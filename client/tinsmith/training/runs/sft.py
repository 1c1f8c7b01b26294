"""Supervised fine-tuning: maximize the likelihood of the examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tinker
from tinker import types
from typing_extensions import override

from tinsmith.training.runs.config import SftConfig
from tinsmith.training.runs.data import Examples, ShuffledBatches, datum_of, learned_count, learned_logprobs, prepare
from tinsmith.training.runs.json_lines import SftExample, parse_sft
from tinsmith.training.runs.objective import HELD_OUT, Objective, Panel, RunKind, with_optimizer
from tinsmith.training.runs.rendering import Rendering


class SupervisedObjective(Objective):
    """The mean negative log-likelihood of a batch's learned tokens."""

    panels = (
        Panel("negative log-likelihood per token", ("train/nll", f"{HELD_OUT}/nll")),
        Panel("learning rate", ("optim/lr",)),
    )

    @override
    def step(self, number: int, adam: types.AdamParams) -> dict[str, float]:
        batch = [sequence for place in self.batches[number] for sequence in self.data.train[place]]
        learned = sum(map(learned_count, batch))
        trained = self.client.forward_backward([datum_of(sequence, 1 / learned) for sequence in batch], "cross_entropy")
        stepped = self.client.optim_step(adam)
        outputs = trained.result().loss_fn_outputs
        # Computed from logprobs, because not every server returns the loss.
        total = sum(
            float(logprob)
            for sequence, output in zip(batch, outputs, strict=True)
            for logprob, is_learned in zip(output["logprobs"].data, sequence.learned[1:], strict=True)
            if is_learned
        )
        tokens = float(sum(len(sequence.tokens) for sequence in batch))
        return with_optimizer({"train/nll": -total / learned, "train/tokens": tokens}, stepped.result())

    @override
    def evaluate(self) -> dict[str, float]:
        held_out = [sequence for example in self.data.held_out for sequence in example]
        if not held_out:
            return {}
        total = sum(learned_logprobs(self.client, held_out, self.batches.batch_size))
        return {f"{HELD_OUT}/nll": -total / sum(map(learned_count, held_out))}


def read(config: SftConfig) -> Examples[SftExample]:
    return Examples.read(config, parse_sft)


def begin(
    config: SftConfig,
    examples: Examples[SftExample],
    rendering: Rendering,
    client: tinker.TrainingClient,
    state: Mapping[str, Any] | None,
) -> Objective:
    data = prepare(config, examples, lambda example: rendering.sequences(example, config.train_on))
    return SupervisedObjective(
        client, data, ShuffledBatches(len(data.train), config.batch_size, config.epochs, config.seed)
    )


SFT: RunKind[SftConfig, SftExample] = RunKind(SftConfig, read, begin)
