"""A decode batch: rows of the same extent, which is the number of positions in a row.

The adapters of a batch share a shape, and one forward per step serves all rows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.sampling.base import DrawnToken, Sequence, TopkLogprobs
from tinsmith_trainer.sampling.builtin.adapter_groups import AdapterGroups, StackMemory
from tinsmith_trainer.sampling.builtin.adapters import (
    AdapterRun,
    AdapterShape,
    LoadedAdapter,
    RowAdapters,
    moves_into_runs,
    route_by_products,
)
from tinsmith_trainer.sampling.builtin.draws import ChangedRows, all_logprobs, draw_tokens, on_device, top_logprobs
from tinsmith_trainer.sampling.builtin.forward import ForwardPass, prefix_spans
from tinsmith_trainer.sampling.builtin.jobs import Sample, not_finite
from tinsmith_trainer.sampling.builtin.kv_cache import RowGeometry
from tinsmith_trainer.sampling.builtin.rules.logit_changes import changed_rows
from tinsmith_trainer.sampling.builtin.settings import BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.steps.launched import Feed, LaunchedStep, feed_of, token_ids
from tinsmith_trainer.sampling.builtin.steps.recorded import RecordedSteps
from tinsmith_trainer.torch_model.lora import Route

SMALLEST_EXTENT = 256
TRIMMED_EXTENT_STEP = 32
RECORDED_EXTENTS = 4
"""The number of extents of a batch whose steps are recorded: each needs recordings of its own."""
ROWS_STEP = 8


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The key of a batch. Samples with equal keys may share a batch.

    In deterministic mode, the shapes of a forward depend only on this key and the settings. So the bits of a row do not
    depend on other rows. The extent depends only on the length of the row. If adapters are stacked, all adapters of a
    batch have one `shape`. `alone` is the serial of the adapter if the adapter is too large for a copy in each row,
    otherwise 0.
    """

    extent: int
    shape: AdapterShape = AdapterShape()
    alone: int = 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The extents, the numbers of rows, and the costs of batches."""

    geometry: RowGeometry
    settings: BuiltinSamplerSettings
    max_sequence_length: int
    stacks: StackMemory = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stacks", StackMemory(self.settings.stacked_adapter_bytes))

    @property
    def reads_behind(self) -> bool:
        """Return whether the next step is launched before the previous step's tokens are read."""
        setting = self.settings.reads_behind
        return self.geometry.device.type != "cpu" if setting is None else setting

    def key(self, sample_position: int, adapter: LoadedAdapter) -> BatchKey:
        """Return the key of the batch for a sample whose next token has this position in the row."""
        extent = SMALLEST_EXTENT
        while extent <= sample_position:
            extent *= 2
        extent = min(extent, self.max_sequence_length)
        if not self.settings.deterministic:
            return BatchKey(extent)
        large = adapter.nbytes * self.rows(extent) > self.settings.stacked_adapter_bytes
        return BatchKey(extent, adapter.shape, adapter.serial if large else 0)

    def rows(self, extent: int) -> int:
        """Return the number of rows that fit in a quarter of the memory, at most `max_rows`.

        The number of rows is a power of two.
        """
        affordable = self.settings.kv_cache_bytes // 4 // self.geometry.row_bytes(extent)
        return min(self.settings.max_rows, 1 << max(0, affordable.bit_length() - 1))

    def route_of_rows(self, adapters: Items[LoadedAdapter], tokens: int, modules: Items[str]) -> Route:
        """Return the route of a forward with this many tokens in each row; rows of one adapter must be adjacent."""
        if len({adapter.serial for adapter in adapters}) == 1:
            return self.route_of_one(adapters[0], len(adapters) * tokens, modules)
        return route_by_products(adapter_runs(adapters, tokens), modules)

    def route_of_one(self, adapter: LoadedAdapter, tokens: int, modules: Items[str]) -> Route:
        """Return the route of a forward with this many tokens for one adapter."""
        if self.settings.deterministic:
            return adapter.route_of_all()
        return route_by_products([(adapter, tokens)], modules)

    def filled_bytes(self, sample: Sample) -> int:
        """Return the number of bytes of the used positions in the sample's row."""
        return self.geometry.row_bytes(sample.own_position)

    def nbytes(self, extent: int) -> int:
        return self.rows(extent) * self.geometry.row_bytes(extent)


def adapter_runs(adapters: Items[LoadedAdapter], tokens: int) -> list[AdapterRun]:
    """Return the runs of adapters, for rows of this many tokens each."""
    same = (list(rows) for _, rows in itertools.groupby(adapters, lambda adapter: adapter.serial))
    return [(rows[0], len(rows) * tokens) for rows in same]


def computed_rows(used: int) -> int:
    """Round the number of rows up to one of a few numbers.

    The library for products needs a preparation for each new shape. So the number of shapes is small, but few of the
    computed rows are unused.
    """
    return 1 << (used - 1).bit_length() if used <= ROWS_STEP else -(-used // ROWS_STEP) * ROWS_STEP


@dataclass(slots=True)
class StepResult:
    """The samples that left the batch in one step. `failed` holds each sample that cannot continue, with the reason."""

    ended: list[tuple[Sample, Sequence]] = field(default_factory=list)
    outgrown: list[Sample] = field(default_factory=list)
    failed: list[tuple[Sample, TrainerError]] = field(default_factory=list)
    drawn_tokens: int = 0

    def took(self, sample: Sample, drawn: DrawnToken, extent: int) -> bool:
        """Append the drawn token to the sample. Return whether the sample must leave a batch of this extent."""
        if math.isnan(drawn.logprob):
            self.failed.append((sample, not_finite(sample.run)))
            return True
        self.drawn_tokens += 1
        sequence = sample.push(drawn)
        if sample.changes is not None and sample.changes.error is not None:
            self.failed.append((sample, sample.changes.error))
        elif sequence is not None:
            self.ended.append((sample, sequence))
        elif sample.own_position >= extent:
            self.outgrown.append(sample)
        else:
            return False
        return True


class DecodeBatch:
    """Samples in fixed rows. In deterministic mode, every step computes all rows, including idle rows."""

    def __init__(self, key: BatchKey, plan: BatchPlan, forward: ForwardPass) -> None:
        self.key = key
        self.nbytes = plan.nbytes(key.extent)
        self._plan = plan
        self._forward = forward
        self._fixed = plan.settings.deterministic
        self._samples: list[Sample | None] = [None] * plan.rows(key.extent)
        self._written = [0] * len(self._samples)  # for each row the number of positions that any sample has written
        self._kv = forward.geometry.allocate(len(self._samples), key.extent)
        self._adapters = RowAdapters(len(self._samples))
        self._groups = AdapterGroups(plan.stacks)
        self._launched: LaunchedStep | None = None
        # The library for products may choose another kernel for a recording, so equal bits exclude recordings.
        most = 0 if self._fixed else plan.settings.recorded_steps
        self._recorded = RecordedSteps(forward.recorder, most) if forward.recorder is not None and most else None

    @property
    def samples(self) -> list[Sample]:
        return [sample for sample in self._samples if sample is not None]

    @property
    def free_rows(self) -> int:
        return self._samples.count(None)

    @property
    def rows_by_tenant(self) -> Counter[str]:
        return Counter(sample.run.job.tenant for sample in self.samples)

    def cost(self, rows: int) -> float:
        """Return the cost of a step with this many used rows."""
        computed = len(self._samples) if self._fixed else rows
        prefixes = {sample.prefix for sample in self.samples if sample.prefix}
        shared = sum(prefix.tokens for prefix in prefixes)
        return self._forward.cost.of(computed, computed * self._extent_in_use(self.samples) + shared)

    def filled_bytes(self) -> int:
        return sum(self._plan.filled_bytes(sample) for sample in self.samples)

    def put(self, sample: Sample) -> None:
        """Give a sample a free row, and copy the sample's keys and values into the row."""
        row = self._samples.index(None)
        assert isinstance(sample.kv, Tensor)
        with torch.inference_mode():
            self._write(row, sample.kv[:, :, 0, :, : sample.own_position])
        sample.kv = None
        self._samples[row] = sample
        self._groups.is_idle = False

    def _write(self, row: int, kv: Tensor) -> None:
        """Copy keys and values to the beginning of a row."""
        end, written = kv.shape[3], self._written[row]
        self._kv[:, :, row, :, :end] = kv
        if written > end:
            # The mask hides the values of an earlier sample, but a masked NaN would remain NaN.
            self._kv[:, :, row, :, end:written] = 0
        self._written[row] = end

    def _take_out(self, row: int) -> Sample:
        """Free a row. A token that was not read yet is dropped, and the next draw gives the same token."""
        sample = self._vacate(row)
        if self._launched is not None:
            self._launched.forget(sample)
        self._groups.is_idle = not self.samples
        return sample

    def _vacate(self, row: int) -> Sample:
        sample, self._samples[row] = self._samples[row], None
        assert sample is not None
        # a launched step that is not read yet has written one more position
        self._written[row] = sample.own_position + 2
        return sample

    def _held(self, sample: Sample) -> int:
        """Return the number of computed positions in the sample's row."""
        unread = self._launched is not None and self._launched.row_of(sample) is not None
        return sample.own_position + unread

    def park(self, sample: Sample) -> None:
        """Take a sample out of the batch.

        The sample's keys and values move to the host's memory. Later, the sample continues with these keys and values.
        """
        row = self._samples.index(sample)
        kept = self._kv[:, :, row : row + 1, :, : sample.own_position]
        sample.kv = kept.clone() if kept.device.type == "cpu" else kept.cpu()
        self._take_out(row)

    def remove_finished(self) -> None:
        """Free the rows of jobs that ended early."""
        for row, sample in enumerate(self._samples):
            if sample is not None and sample.run.finished:
                self._take_out(row)

    def step(self, tenants: Collection[str]) -> StepResult:
        """Draw a token for every sample of these tenants.

        If steps are launched ahead, launch the next step, and read the tokens of the previous step.
        """
        if not self._fixed:
            self._arrange()
        launched = self._launch(self._rows_of(tenants))
        if self._plan.reads_behind:
            launched, self._launched = self._launched, launched
        return self._read(launched) if launched is not None else StepResult()

    @torch.inference_mode()
    def _arrange(self) -> None:
        """Move used rows to the front.

        Rows of one adapter become adjacent, and within one adapter, the rows of one prefix become adjacent.
        """
        order = {group: place for place, group in enumerate(sorted({_group(sample) for sample in self.samples}))}
        moves = moves_into_runs([None if sample is None else order[_group(sample)] for sample in self._samples])
        if not moves:
            return
        moved = [self._vacate(source) for source, _ in moves]
        # A row that moves may replace another row that also moves.
        kept = [
            self._kv[:, :, source, :, : self._held(sample)].clone()
            for (source, _), sample in zip(moves, moved, strict=True)
        ]
        for (_, target), sample, kv in zip(moves, moved, kept, strict=True):
            self._write(target, kv)
            self._samples[target] = sample

    def _rows_of(self, tenants: Collection[str]) -> Items[int]:
        """Return the rows to compute. If all tenants take part, the rows are a range that begins at row 0."""
        if self._fixed:
            return range(len(self._samples))
        used = len(self.samples)
        chosen = [row for row in range(used) if self._tenant(row) in tenants]
        return chosen if len(chosen) < used else range(min(len(self._samples), computed_rows(used)))

    def _tenant(self, row: int) -> str | None:
        sample = self._samples[row]
        return None if sample is None else sample.run.job.tenant

    @torch.inference_mode()
    def _launch(self, rows: Items[int]) -> LaunchedStep | None:
        """Launch a step. Return None if all rows must wait until the previous step is read."""
        device, before = self._forward.device, self._launched
        feeds = [feed_of(self._samples[row], before, self.key.extent) for row in rows]
        if all(feed.sample is None for feed in feeds):
            return None
        samples = [self._samples[row] for row in rows]
        positions = on_device([feed.position for feed in feeds], torch.long, device)[:, None]
        logits = self._forward.step(
            self._kv,
            token_ids(feeds, before, device),
            positions,
            self._extent_in_use(feeds),
            self._route(samples),
            None if isinstance(rows, range) else list(rows),
            angles=_angles(positions, samples),
            shared=prefix_spans([None if sample is None else sample.prefix for sample in samples]),
            recorded=self._recorded,
        )
        drawing = [feed.sample for feed in feeds]
        drawn = draw_tokens(logits, [feed.draw for feed in feeds], _changed(logits, drawing))
        return LaunchedStep(drawing, *drawn, logits)

    @torch.inference_mode()
    def _read(self, launched: LaunchedStep) -> StepResult:
        result = StepResult()
        for sample, drawn in drawn_by(launched).items():
            self._advance(sample, drawn, result)
        return result

    def _advance(self, sample: Sample, drawn: DrawnToken, result: StepResult) -> None:
        if not result.took(sample, drawn, self.key.extent):
            return
        row = self._samples.index(sample)
        if sample in result.outgrown:
            sample.kv = self._kv[:, :, row : row + 1].clone()
        self._take_out(row)

    def _route(self, samples: list[Sample | None]) -> Route:
        if self._fixed:
            return self._adapters.route([None if s is None else s.run.adapter for s in samples], len(samples))
        return self._by_products(samples)

    def _by_products(self, samples: list[Sample | None]) -> Route:
        """Return the route by products.

        Idle rows come last, and use the adapter of the last used row.
        """
        used = [sample.run.adapter for sample in samples if sample is not None]
        used += [used[-1]] * (len(samples) - len(used))
        runs = adapter_runs(used, 1)
        if len(runs) == 1:  # one adapter has the same route for any number of rows, and recorded steps depend on it
            runs = [(used[0], 1)]
        return self._groups.route(runs, self._forward.modules)

    def _extent_in_use(self, feeds: Items[Feed | Sample]) -> int:
        if self._fixed:
            return self.key.extent
        longest = max(feed.own_position for feed in feeds) + 1
        step = TRIMMED_EXTENT_STEP
        if self._recorded is not None:
            step *= max(1, -(-self.key.extent // (RECORDED_EXTENTS * step)))
        return min(self.key.extent, -(-longest // step) * step)


def _group(sample: Sample) -> tuple[int, int]:
    """Return the group of a sample: rows of one group are adjacent."""
    return sample.run.adapter.serial, 0 if sample.prefix is None else 1 + sample.prefix.serial


def _angles(positions: Tensor, samples: Items[Sample | None]) -> Tensor | None:
    """Return the positions for rotary embeddings, or None if they are equal to `positions` `[rows, 1]`."""
    shifts = [0 if sample is None else sample.run.angle_shift for sample in samples]
    return positions + on_device(shifts, torch.long, positions.device)[:, None] if any(shifts) else None


def _changed(logits: Tensor, samples: Items[Sample | None]) -> ChangedRows | None:
    return changed_rows(logits, [None if sample is None else sample.changes for sample in samples])


def drawn_of(logits: Tensor, samples: Items[Sample]) -> list[DrawnToken]:
    """Draw one token for each row of logits `[rows, vocab]`, with the parameters of the row's sample."""
    drawn = draw_tokens(logits, [sample.draw() for sample in samples], _changed(logits, samples))
    return list(drawn_by(LaunchedStep(samples, *drawn, logits)).values())


def drawn_by(launched: LaunchedStep) -> dict[Sample, DrawnToken]:
    """Wait for a launched step, and return the drawn tokens."""
    top = _top_logprobs(launched)
    tokens, logprobs = launched.read()
    return {sample: DrawnToken(tokens[row], logprobs[row], top.get(sample)) for sample, row in launched.samples.items()}


def _top_logprobs(launched: LaunchedStep) -> dict[Sample, TopkLogprobs]:
    """Return the most likely tokens for the samples that request most likely tokens.

    The result for a smaller K is the beginning of the result for a larger K.
    """
    counts = {sample: k for sample in launched.samples if (k := sample.run.job.topk_sample_logprobs)}
    if not counts or launched.logits is None:
        return {}
    rows = [row for sample, row in launched.samples.items() if sample in counts]
    ids, logprobs = top_logprobs(all_logprobs(launched.logits[rows]), max(counts.values()))
    found = zip(counts.items(), ids.int().cpu().numpy(), logprobs.cpu().numpy(), strict=True)
    return {
        sample: TopkLogprobs(tokens[None, :k].copy(), values[None, :k].copy()) for (sample, k), tokens, values in found
    }
