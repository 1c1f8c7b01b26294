"""Sequences that are drawn with a model's own cache. Each sequence has separate states.

A step computes several sequences of one adapter together if the sequences are equally long and the states can be
combined, for example for samples of one prompt. All other sequences are computed one by one. In deterministic mode, all
sequences are computed one by one, so that the bits of a row do not depend on other rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items

import torch

from tinsmith_trainer.sampling.base import DrawnToken
from tinsmith_trainer.sampling.builtin.batch import BatchKey, BatchPlan, StepResult, drawn_of
from tinsmith_trainer.sampling.builtin.jobs import Sample
from tinsmith_trainer.sampling.builtin.model_cache.forward import CacheForward
from tinsmith_trainer.sampling.builtin.model_cache.states import SequenceStates, UnlikeStates


class CacheBatch:
    """The counterpart of a DecodeBatch for a model's own cache."""

    def __init__(self, key: BatchKey, plan: BatchPlan, forward: CacheForward) -> None:
        self.key = key
        self.nbytes = plan.nbytes(key.extent)
        self._plan = plan
        self._forward = forward
        self._rows = plan.rows(key.extent)
        self._in_rows = forward.in_rows and not plan.settings.deterministic
        self._states: dict[Sample, SequenceStates | None] = {}

    @property
    def samples(self) -> list[Sample]:
        return list(self._states)

    @property
    def free_rows(self) -> int:
        return self._rows - len(self._states)

    @property
    def rows_by_tenant(self) -> Counter[str]:
        return Counter(sample.run.job.tenant for sample in self._states)

    def cost(self, rows: int) -> float:
        """Return the cost of a step of this many rows, with one forward for each row."""
        longest = max((sample.position for sample in self._states), default=0) + 1
        return rows * self._forward.cost.of(1, longest)

    def filled_bytes(self) -> int:
        return sum(self._plan.filled_bytes(sample) for sample in self._states)

    def put(self, sample: Sample) -> None:
        """Give a sample a row with a copy of the sample's states.

        The samples of a prompt share the original states, so the original states must not change.
        """
        assert not isinstance(sample.kv, torch.Tensor)
        with torch.inference_mode():
            self._states[sample] = None if sample.kv is None else sample.kv.to(self._forward.device).clone()
        sample.kv = None

    def park(self, sample: Sample) -> None:
        """Take a sample out of the batch.

        The sample's states move to the host's memory, and the sample continues with these states later.
        """
        states = self._states.pop(sample)
        # The states are copied, because rows of one forward share a block of memory.
        sample.kv = None if states is None else states.clone().to("cpu")

    def remove_finished(self) -> None:
        """Free the rows of jobs that ended early."""
        self._states = {sample: states for sample, states in self._states.items() if not sample.run.finished}

    def step(self, tenants: Collection[str]) -> StepResult:
        """Draw a token for every sample of these tenants."""
        result = StepResult()
        chosen = [sample for sample in self._states if sample.run.job.tenant in tenants]
        # No sample leaves the batch before all groups are computed, because an error fails the samples in the batch.
        computed = [(samples, self._drawn(samples)) for samples in self._groups(chosen)]
        for samples, tokens in computed:
            for sample, drawn in zip(samples, tokens, strict=True):
                self._advance(sample, drawn, result)
        return result

    def _groups(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """Yield groups of samples with the same length and adapter, and single samples that must be computed alone.

        A group has only one adapter, because some layers, such as latent attention, compute all tokens of a row again
        in each step.
        """
        if not self._in_rows:
            yield from ([sample] for sample in samples)
            return
        alike: dict[tuple[int, int], list[Sample]] = {}
        for sample in samples:
            alike.setdefault((sample.position, sample.run.adapter.serial), []).append(sample)
        yield from alike.values()

    def _drawn(self, samples: list[Sample]) -> Items[DrawnToken]:
        try:
            return self._compute(samples)
        except UnlikeStates:
            return [drawn for sample in samples for drawn in self._compute([sample])]

    @torch.inference_mode()
    def _compute(self, samples: list[Sample]) -> Items[DrawnToken]:
        ids = torch.tensor([[sample.next_token] for sample in samples], device=self._forward.device)
        route = self._plan.route_of_one(samples[0].run.adapter, len(samples), self._forward.modules)
        states = [states for sample in samples if (states := self._states[sample]) is not None]
        if states:
            logits, after = self._forward.step(states, ids, route)
        else:  # the prompt has one token
            whole, begun = self._forward.extend(None, ids, route, all_logits=False)
            logits, after = whole[:, 0], begun.split()
        self._states.update(zip(samples, after, strict=True))
        return drawn_of(logits, samples)

    def _advance(self, sample: Sample, drawn: DrawnToken, result: StepResult) -> None:
        if not result.took(sample, drawn, self.key.extent):
            return
        states = self._states.pop(sample)
        if sample in result.outgrown:
            sample.kv = states
