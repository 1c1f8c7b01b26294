"""Steps that a device computes while the host reads the previous step.

Without this overlap, a GPU is idle after each token. The GPU would wait until the host has read the token, searched for
stops and chosen the next inputs. So the host launches the next step before it reads the previous step. For rows that
may continue, the input tokens of the next step are the tokens of the previous step, on the device. If the host then
finds a stop, the row's next token is dropped. A row whose logits change with each token waits for the previous step.
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
    """The input of a row: the token at `position`, and the draw's parameters.

    `own_position` is the position within the row.

    `source` is the row of the previous step in which the token is drawn, or None if the host knows the token. `sample`
    is None if the row is idle, or if the row's next token cannot be computed yet.
    """

    token: int = 0
    position: int = 0
    own_position: int = 0
    source: int | None = None
    draw: Draw = Draw()
    sample: Sample | None = None


def feed_of(sample: Sample | None, before: LaunchedStep | None, extent: int) -> Feed:
    """Return the input of a sample in a row of `extent` positions, while the previous step is not read yet."""
    if sample is None:
        return Feed()
    source = before.row_of(sample) if before else None
    position, own = sample.position, sample.own_position
    if source is None:
        return Feed(sample.next_token, position, own, None, sample.draw(), sample)
    waits = sample.changes is not None and sample.changes.needs_last_token
    if len(sample.tokens) + 1 < sample.run.max_tokens and own + 1 < extent and not waits:
        return Feed(0, position + 1, own + 1, source, sample.draw(ahead=1), sample)
    return Feed(sample.next_token, position, own)  # the same token again


def token_ids(feeds: Sequence[Feed], before: LaunchedStep | None, device: torch.device) -> Tensor:
    """Return the token IDs `[rows, 1]`."""
    known = on_device([feed.token for feed in feeds], torch.long, device)
    if before is None or all(feed.source is None for feed in feeds):
        return known[:, None]
    drawn = len(before.tokens)
    places = [drawn + row if feed.source is None else feed.source for row, feed in enumerate(feeds)]
    return torch.cat([before.tokens, known]).index_select(0, on_device(places, torch.long, device))[:, None]


class LaunchedStep:
    """A launched step.

    `tokens` and `logprobs` are `[rows]` on the device. `logits` are `[rows, vocab]` if the most likely tokens are
    requested.
    """

    def __init__(self, samples: Sequence[Sample | None], tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
        self.tokens = tokens
        self._rows = {sample: row for row, sample in enumerate(samples) if sample is not None}
        needs_logits = any(sample.run.job.topk_sample_logprobs for sample in self._rows)
        self.logits = logits if needs_logits else None
        self._fetched = Fetched(tokens, logprobs)

    @property
    def samples(self) -> dict[Sample, int]:
        """The samples that take the drawn tokens, each with the sample's row in this step."""
        return dict(self._rows)

    def row_of(self, sample: Sample) -> int | None:
        return self._rows.get(sample)

    def forget(self, sample: Sample) -> None:
        """Drop the sample's token."""
        self._rows.pop(sample, None)

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for this step, but not for later steps, and return the step's tokens and logprobs."""
        tokens, logprobs = self._fetched.read()
        return tokens.tolist(), logprobs.tolist()


class Fetched:
    """Tensors that are being copied to the host."""

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
