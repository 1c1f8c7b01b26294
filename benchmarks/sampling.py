"""Samples per second through SDK and server, as a multiple of transformers' `generate` with a PEFT adapter."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from comparing import Medians, Options, measure_in_turns, parse_options
from rich.console import Console
from rich.table import Table
from sides import ServedSamples, bare, training_client
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from workloads import PROMPT_TOKENS, SAMPLED_TOKENS, Workload

SAMPLES = 32
SAMPLES_ONE_BY_ONE = 4
REFERENCES = {"sample_one_by_one": SAMPLES_ONE_BY_ONE, "sample_together": SAMPLES}


@dataclass(frozen=True, slots=True)
class SamplingRate:
    """Samples per second of one model, against one way to call `generate`."""

    parameters: str
    threads: int
    reference: str
    samples_per_second: Medians


def measure(workload: Workload, options: Options, scratch: Path) -> list[SamplingRate]:
    model = make_tiny_model(scratch / "model", shape=workload.shape)
    with training_client(model, scratch) as client:
        served = ServedSamples(client, workload.shape.vocab_size)
        return [
            SamplingRate(workload.name, options.threads, loop, _rates(loop, model, served, workload, options))
            for loop in REFERENCES
        ]


def _rates(loop: str, model: Path, served: ServedSamples, workload: Workload, options: Options) -> Medians:
    with bare(loop, model) as reference:
        pairs = measure_in_turns(
            reference,
            served,
            reference_count=REFERENCES[loop],
            served_count=SAMPLES,
            blocks=options.blocks,
            name=f"{workload.name} parameters, {loop}",
        )
    return Medians.of([(1 / reference_seconds, 1 / served_seconds) for reference_seconds, served_seconds in pairs])


def draw(results: Sequence[SamplingRate]) -> Table:
    what = f"samples of {SAMPLED_TOKENS} tokens per second, prompts of {PROMPT_TOKENS}"
    table = Table(title=f"{what}, threads: {results[0].threads}")
    for heading in ("model", "generate", "by itself", "SDK and server", "ratio", "quartiles"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        low, high = one.samples_per_second.ratio_quartiles
        table.add_row(
            one.parameters,
            one.reference.removeprefix("sample_").replace("_", " "),
            f"{one.samples_per_second.reference:.1f}",
            f"{one.samples_per_second.served:.1f}",
            f"{one.samples_per_second.ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
        )
    return table


def main() -> None:
    options = parse_options(__doc__ or "")
    results = []
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as scratch:
            results += measure(workload, options, Path(scratch))
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        Console().print(draw(results))


if __name__ == "__main__":
    main()
