"""The checks of each family: steps and plain PEFT's, samples and the trainer's logprobs, an export, a replay."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peft import PeftModel
from support.sampler.jobs import ask, full_logprobs, job, prompt_of
from support.worker.in_process import Worker
from support.worker.messages import forward_backward, next_token_datum
from support.worker.process import MODEL, Call, step
from support.zoo.families import SIZES, family_directory, family_model
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.engines.base import AdapterState, Datum, Engine, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.errors import TrainerError, UserError
from tinsmith_trainer.parity.compare import Quantity, compare
from tinsmith_trainer.parity.plan import ALPHA, TARGETS, ParityPlan, plan_steps
from tinsmith_trainer.parity.sides import (
    ADAPTER,
    REFERENCE,
    compute,
    opened,
    options_of,
    parse_choice,
    run,
    with_sampler_logprobs,
)
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.model_cache.choice import SamplerForward, choose_forward
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.training.snapshotting import SnapshotPolicy
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

STEPS, RANK, SEED = 10, 4, 0
MOST_DATUMS = 2
"""The datums of a call, and one call of a step: a family takes seconds."""
VOCABULARY: int = SIZES["vocab_size"]
PROMPT, NEW_TOKENS = 40, 10
NEVER = 1e9
"""Seconds: no snapshot shortens a replay."""
WEIGHTS_TOLERANCE, GAP_TOLERANCE, EXPORT_TOLERANCE = 1e-5, 1e-5, 1e-4


@dataclass(frozen=True, slots=True)
class Trained:
    """A family's engine, and what ten steps of it are apart from plain PEFT's in the weight that is furthest."""

    model: TorchModel
    engine: Engine
    weights_apart: float
    spec: LoraSpec
    refused: str = ""
    """The reason why no adapter trains its experts; empty where one does, and where it has none."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of one family.

    `refused` is the message of a model that did not load; then there are no other findings. Distances are of weights
    and logprobs; `None`: that was refused, and the notes have the reason.
    """

    model_type: str
    architecture: str
    refused: str = ""
    weights_apart: float | None = None
    memory: str | None = None
    gap: float | None = None
    export_apart: float | None = None
    replays: bool | None = None
    notes: tuple[str, ...] = ()

    def failures(self) -> list[str]:
        """Return the findings that are beyond their tolerance."""
        asked = [
            ("weights against plain PEFT", self.weights_apart, WEIGHTS_TOLERANCE),
            ("trainer against sampler", self.gap, GAP_TOLERANCE),
            ("export against trainer", self.export_apart, EXPORT_TOLERANCE),
        ]
        beyond = [f"{what}: {apart:.1e}" for what, apart, most in asked if apart is not None and not apart <= most]
        return beyond + ["a replay has other bits"] * (self.replays is False)


def examine(model_type: str) -> Findings:
    """All that is asked. Raises whatever is no refusal."""
    model = family_model(model_type)
    found = Findings(model_type, model.info.architecture)
    try:
        trained = train(model_type, model)
    except TrainerError as error:
        return replace(found, refused=_of_any_place(str(error), model))
    notes = [trained.refused] if trained.refused else []
    found = replace(found, weights_apart=trained.weights_apart, replays=asyncio.run(replays(trained)))
    try:
        forward = choose_forward(model)
    except TrainerError as error:
        notes.append(str(error))
    else:
        found = replace(found, memory=forward.memory, gap=sampling_gap(trained, forward))
    try:
        found = replace(found, export_apart=export_apart(trained))
    except ValueError as error:  # PEFT's word for modules that it does not adapt
        notes.append(f"PEFT does not load the export: {_first_sentence(error)}")
    return replace(found, notes=tuple(notes))


def train(model_type: str, model: TorchModel) -> Trained:
    """Train the family. Raises TrainerError for a family that the engine refuses."""
    engine = build_peft_engine(model, PeftEngineSettings(max_rank=RANK))
    spec, refused = LoraSpec(RANK, ALPHA, SEED), ""
    try:
        engine.create_adapter(ADAPTER, spec)
        engine.drop(ADAPTER)
    except UserError as error:
        spec, refused = replace(spec, train_mlp=False), str(error)
    plan = with_sampler_logprobs(engine, _plan(spec))
    records = run(engine, plan)
    with unmoved_by_peft():
        choice = parse_choice(REFERENCE)
        with opened(choice, options_of(choice, model=str(family_directory(model_type)), rank=RANK)) as reference:
            differences = compare(records, run(reference, plan))
    apart = max(each.size for each in differences if each.quantity is Quantity.WEIGHTS)
    return Trained(model, engine, apart, spec, refused)


def _plan(spec: LoraSpec) -> ParityPlan:
    """Return steps of one call each from the gate's plan."""
    whole = plan_steps(steps=STEPS, rank=RANK, seed=SEED, vocab_size=VOCABULARY, max_length=512)
    steps = [
        replace(each, calls=[replace(call, datums=call.datums[:MOST_DATUMS]) for call in each.calls[:1]])
        for each in whole.steps
    ]
    return replace(whole, lora=spec, steps=steps)


@contextmanager
def unmoved_by_peft() -> Iterator[None]:
    """Allow plain PEFT to adapt `out_proj` of state spaces.

    PEFT refuses it, because their kernels for training read its weight directly. Here the layers' own products run, so
    the yardstick may adapt it; the export shows that PEFT does not.
    """
    from peft.tuners.lora import LoraModel

    check = LoraModel._check_target_module_compatiblity
    LoraModel._check_target_module_compatiblity = lambda *_: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        LoraModel._check_target_module_compatiblity = check


def sampling_gap(trained: Trained, forward: SamplerForward) -> float:
    """Return the largest difference of the trained adapter's logprobs between sampler and trainer, prompt included."""
    settings = BuiltinSamplerSettings(max_rows=4, prefill_block_tokens=16)
    with closing(BuiltinSampler(trained.model, settings, forward)) as sampler:
        sampler.load_adapter("trained", trained.engine.weights(ADAPTER))
        prompt = prompt_of(PROMPT, vocab_size=VOCABULARY)
        asked = job(prompt, adapter="trained", max_tokens=NEW_TOKENS, num_samples=2, prompt_logprobs=True)
        outcome = ask(sampler, asked)
    apart = []
    for sequence in outcome.sequences:
        expected = trainers_logprobs(trained.engine, [*prompt, *sequence.tokens])
        assert outcome.prompt_logprobs is not None
        found = [*outcome.prompt_logprobs[1:], *sequence.logprobs]
        apart.append(float(np.abs(np.asarray(found) - expected).max()))
    return max(apart)


def trainers_logprobs(engine: Engine, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the trainer's logprob of each token but the first."""
    ids = np.asarray(tokens, np.int32)
    datum = Datum(ids[:-1], {TARGETS: ids[1:].astype(np.int64)})
    outcome = compute(engine, Work(ADAPTER, [datum], LossSpec("cross_entropy"), forward_only=True))
    return outcome.outputs[0]["logprobs"]


def export_apart(trained: Trained) -> float:
    """Return the difference of plain PEFT's logprobs from the trainer's, with the exported adapter.

    Raises ValueError where PEFT does not take it.
    """
    tokens = prompt_of(PROMPT, 1, VOCABULARY)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained.engine.export(trained.engine.state(ADAPTER), Path(folder), "peft")
        plain: Any = AutoModelForCausalLM.from_pretrained(trained.model.directory).eval()
        adapted = PeftModel.from_pretrained(plain, folder).eval()
        found = full_logprobs(adapted, tokens)
    return float(np.abs(found - trainers_logprobs(trained.engine, tokens)).max())


async def replays(trained: Trained) -> bool:
    """Return true if a worker on the disk that a killed one left continues with the same bits."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        before, after = _calls(trained.spec)
        killed = await _worker(Path(first), trained.model)
        await _do(killed, before)
        shutil.copytree(first, second, dirs_exist_ok=True)
        successor = await _worker(Path(second), trained.model)
        await _do(killed, after)
        await _do(successor, after)
        states = [worker.engine.state(MODEL) for worker in (killed, successor)]
        for worker in (killed, successor):
            await worker.service.drain()
    return _bits(states[0]) == _bits(states[1])


async def _worker(folder: Path, model: TorchModel) -> Worker:
    engine = build_peft_engine(model, PeftEngineSettings(max_rank=RANK))
    worker = Worker(folder, engine=engine, policy=SnapshotPolicy(NEVER, NEVER))
    await worker.service.activate(1)
    return worker


async def _do(worker: Worker, calls: Sequence[Call]) -> None:
    for call in calls:
        await worker.submit(call)
        result = await worker.finished(call.seq_id)
        assert result.failure is None, result.failure


def _calls(spec: LoraSpec) -> tuple[list[Call], list[Call]]:
    """Up to the kill, which is between a gradient and its step, and behind it."""
    lora = worker_pb2.LoraConfig(
        **{"rank": RANK, "alpha": ALPHA, "seed": SEED, "train_attn": spec.train_attn},
        **{"train_mlp": spec.train_mlp, "train_unembed": spec.train_unembed},
    )
    create = Call(0, worker_pb2.CREATE_MODEL, worker_pb2.CreateModel(lora=lora).SerializeToString())
    rounds = [call for first in (1, 3, 5) for call in (_train(first), step(first + 1))]
    return [create, *rounds[:3]], rounds[3:]


def _train(seq_id: int) -> Call:
    tokens = [prompt_of(length, seq_id, VOCABULARY).tolist() for length in (12, 30)]
    body = forward_backward([next_token_datum(each) for each in tokens], model_id=MODEL, seq_id=seq_id)
    return Call(seq_id, worker_pb2.FORWARD_BACKWARD, body)


def _bits(state: AdapterState) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in state.tensors.items()}


def _of_any_place(sentence: str, model: TorchModel) -> str:
    """Return the message without the directory of this run."""
    return sentence.replace(model.info.path, "The model")


def _first_sentence(error: Exception) -> str:
    return str(error).rpartition("] ")[2].partition(". ")[0] + "."


def quiet() -> None:
    """Silence transformers, which reports missing kernels of each family, and draws a bar for every file."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
