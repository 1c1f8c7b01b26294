"""Steps that a device computes while the host reads the one before.

A GPU that waits after each token until the host has read it, looked for stops and said what comes next is idle for that
long. So the next step is launched first: it takes its tokens from the step before on the device, where a row may go on.
Where a stop is found in what is read then, the row's next token was computed in vain, and nobody hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_trainer.sampling.builtin.draws import Draw, on_device
from tinsmith_trainer.sampling.builtin.jobs import Sample


@dataclass(frozen=True, slots=True)
class Feed:
    """What a row computes: the token at `position`, and `draw`. `own_position` is that within the row.

    `source` is the place of its token in the step before, or None where the host knows it. Of a row that is idle, or
    whose next token may not be computed yet, no `sample` takes what comes of it.
    """

    token: int = 0
    position: int = 0
    own_position: int = 0
    source: int | None = None
    draw: Draw = Draw()
    sample: Sample | None = None


def feed_of(sample: Sample | None, before: LaunchedStep | None, extent: int) -> Feed:
    """In a row of so many positions, behind a step that nobody has read yet."""
    if sample is None:
        return Feed()
    source = before.place_of(sample) if before else None
    position, own = sample.position, sample.own_position
    if source is None:
        return Feed(sample.next_token, position, own, None, sample.draw(), sample)
    if len(sample.tokens) + 1 < sample.run.max_tokens and own + 1 < extent:
        return Feed(0, position + 1, own + 1, source, sample.draw(ahead=1), sample)
    return Feed(sample.next_token, position, own)  # the same once more


def token_ids(feeds: Sequence[Feed], before: LaunchedStep | None, device: torch.device) -> Tensor:
    """`[rows, 1]`"""
    known = on_device([feed.token for feed in feeds], torch.long, device)
    if before is None or all(feed.source is None for feed in feeds):
        return known[:, None]
    drawn = len(before.tokens)
    places = [drawn + row if feed.source is None else feed.source for row, feed in enumerate(feeds)]
    return torch.cat([before.tokens, known]).index_select(0, on_device(places, torch.long, device))[:, None]


class LaunchedStep:
    """`tokens` and `logprobs` `[rows]` on the device; `logits` `[rows, vocab]` where some asked for the likeliest."""

    def __init__(self, samples: Sequence[Sample | None], tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
        self.tokens = tokens
        self._places = {sample: row for row, sample in enumerate(samples) if sample is not None}
        asked = any(sample.run.job.topk_sample_logprobs for sample in self._places)
        self.logits = logits if asked else None
        self._fetched = Fetched(tokens, logprobs)

    @property
    def samples(self) -> dict[Sample, int]:
        """Those that take what was drawn, with their rows in this step."""
        return dict(self._places)

    def place_of(self, sample: Sample) -> int | None:
        return self._places.get(sample)

    def forget(self, sample: Sample) -> None:
        """Its token is of no use."""
        self._places.pop(sample, None)

    def read(self) -> tuple[list[int], list[float]]:
        """Waits for this step, and for none behind it."""
        tokens, logprobs = self._fetched.read()
        return tokens.tolist(), logprobs.tolist()


class Fetched:
    """Tensors on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._on_host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._there = None
        if tensors[0].device.type == "cuda":
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()

    def read(self) -> list[Tensor]:
        if self._there is not None:
            self._there.synchronize()
        return self._on_host
