"""Direct preference optimization.

Training makes the chosen answer more likely than the rejected answer, relative to a reference model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tinker
from tinker import types
from typing_extensions import override

from tinsmith.training.runs.config import DpoConfig
from tinsmith.training.runs.data import (
    Examples,
    Prepared,
    Sequences,
    ShuffledBatches,
    datum_of,
    learned_logprobs,
    prepare,
)
from tinsmith.training.runs.json_lines import Preference, parse_dpo
from tinsmith.training.runs.objective import HELD_OUT, Objective, Panel, RunKind, with_optimizer
from tinsmith.training.runs.rendering import Rendering

if TYPE_CHECKING:
    import torch


class PreferenceObjective(Objective):
    """The loss in equation 7 of arXiv 2305.18290, as the mean over the pairs of a batch.

    The reference is the initial model. The reference logprobs of all pairs are computed once, before the first step.
    The reference logprobs are part of the state of the run.
    """

    panels = (
        Panel("loss", ("train/loss", f"{HELD_OUT}/loss")),
        Panel("how often the chosen one is preferred", ("train/accuracy", f"{HELD_OUT}/accuracy")),
    )

    def __init__(
        self,
        client: tinker.TrainingClient,
        data: Prepared,
        batches: ShuffledBatches,
        beta: float,
        state: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(client, data, batches)
        self._beta = beta
        if state is None:
            self._train_reference = self._margins(data.train)
            self._held_out_reference = self._margins(data.held_out)
        else:
            self._train_reference, self._held_out_reference = state["reference"]

    @override
    def step(self, number: int, adam: types.AdamParams) -> dict[str, float]:
        places = self.batches[number]
        sequences = [sequence for place in places for sequence in self.data.train[place]]
        reference = [self._train_reference[place] for place in places]
        seen: list[float] = []

        def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            margins = _margins_of(data, logprobs)
            seen.extend(margins.tolist())
            return _losses(margins, reference, self._beta).mean(), {}

        trained = self.client.forward_backward_custom([datum_of(sequence) for sequence in sequences], loss)
        stepped = self.client.optim_step(adam)
        trained.result()
        tokens = float(sum(len(sequence.tokens) for sequence in sequences))
        metrics = {f"train/{name}": value for name, value in self._judged(seen, reference).items()}
        return with_optimizer({**metrics, "train/tokens": tokens}, stepped.result())

    @override
    def evaluate(self) -> dict[str, float]:
        if not self.data.held_out:
            return {}
        judged = self._judged(self._margins(self.data.held_out), self._held_out_reference)
        return {f"{HELD_OUT}/{name}": value for name, value in judged.items()}

    @override
    def state(self) -> dict[str, Any]:
        return {"reference": [self._train_reference, self._held_out_reference]}

    def _margins(self, pairs: Sequence[Sequences]) -> list[float]:
        """Return the chosen answer's logprob minus the rejected answer's logprob under the current weights, in nats."""
        logprobs = learned_logprobs(
            self.client, [sequence for pair in pairs for sequence in pair], 2 * self.batches.batch_size
        )
        return [chosen - rejected for chosen, rejected in zip(logprobs[::2], logprobs[1::2], strict=True)]

    def _judged(self, margins: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
        import torch

        gained = [now - before for now, before in zip(margins, reference, strict=True)]
        return {
            "loss": float(_losses(torch.tensor(margins, dtype=torch.float64), reference, self._beta).mean()),
            # Before the first step all margins are equal.
            "accuracy": sum(1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gained) / len(gained),
            "margin": self._beta * sum(gained) / len(gained),
        }


def _margins_of(data: Sequence[types.Datum], logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the margin of each pair. In `sequences`, chosen and rejected answers alternate."""
    import torch

    sums = torch.stack(
        [
            (token_logprobs.double() * datum.loss_fn_inputs["weights"].to_torch().double()).sum()
            for datum, token_logprobs in zip(data, logprobs, strict=True)
        ]
    )
    return sums[::2] - sums[1::2]


def _losses(margins: torch.Tensor, reference: Sequence[float], beta: float) -> torch.Tensor:
    import torch

    return -torch.nn.functional.logsigmoid(beta * (margins - torch.tensor(reference, dtype=margins.dtype)))


def read(config: DpoConfig) -> Examples[Preference]:
    return Examples.read(config, parse_dpo)


def begin(
    config: DpoConfig,
    examples: Examples[Preference],
    rendering: Rendering,
    client: tinker.TrainingClient,
    state: Mapping[str, Any] | None,
) -> Objective:
    data = prepare(
        config,
        examples,
        lambda pair: (rendering.render(pair.chosen), rendering.render(pair.rejected)),
        are_compared=True,
    )
    batches = ShuffledBatches(len(data.train), config.batch_size, config.epochs, config.seed)
    return PreferenceObjective(client, data, batches, config.beta, state)


DPO: RunKind[DpoConfig, Preference] = RunKind(DpoConfig, read, begin)
