"""Random kills under four programs of two tenants, who share two slots: `make soak`.

Each program trains a model of its own, and now and then samples it, through the real SDK, unaware of the
kills. Which process is killed next, and after how many more answers, is drawn from a seed, as the programs' data are.
In the end the same programs run undisturbed in a new installation, for as many rounds: every answer and every tensor
must be the same, bit for bit, or with `--numerics fast` within rounding. Each step is once in the series of its run.
`--seed` and `--kills` play it again; what was killed when is printed as it happens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import tinker
from numpy.typing import NDArray
from safetensors.numpy import load_file
from support.client.pipelined_program import CHECKPOINT_FILES, TINY_MODEL, checkpoint_run_folder
from support.client.sdk import adam, exact_logprobs, next_token_datum
from support.comparing_runs import Ending, Numbers, beyond_rounding, differences
from support.server.serve_process import API_KEY, ServedInstallation
from tinker import types
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

PROGRAMS = ("ada-1", "ada-2", "bob-1", "bob-2")
ROUNDS_AHEAD = 3
SAMPLE_EVERY = 5
MOST_ANSWERS_BETWEEN = 12
LONGEST_DELAY_SECONDS = 1.5
FAULTS = ("worker", "server", "both", "clean stop", "idle")
SUSPEND_AFTER_SECONDS = 2
SUSPENSION_PATIENCE_SECONDS = 120.0
SETTINGS = {
    "adapter_slots": "2",
    "poll_hold_seconds": "5",
    "suspend_after_seconds": str(SUSPEND_AFTER_SECONDS),
    # Kills that come from outside are no sign against the operation that they happen to hit.
    "engine_flags": "--attempts-per-operation 1000000",
}


@dataclass
class Progress:
    """The number of answered rounds, for which the killing thread waits. The programs pause while `goes` is not set."""

    answered: int = 0
    goes: threading.Event = field(default_factory=threading.Event)
    failed: BaseException | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self) -> None:
        with self._changed:
            self.answered += 1
            self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        with self._changed:
            self.failed = error
            self._changed.notify_all()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the programs wait, each after the answers to its last calls."""
        self.goes.clear()
        try:
            yield
        finally:
            self.goes.set()

    def wait_beyond(self, answered: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.answered >= answered or self.failed is not None)
        if self.failed is not None:
            raise self.failed


@dataclass(frozen=True)
class Program:
    """A program that trains until it is stopped, or for `rounds`; each round is the same in every run."""

    name: str
    seed: int
    server: ServedInstallation
    api_key: str
    progress: Progress
    stop: threading.Event
    rounds: int | None = None

    def run(self) -> Ending:
        try:
            return self._run()
        except BaseException as error:
            self.progress.give_up(error)
            raise

    def _run(self) -> Ending:
        client = tinker.ServiceClient(base_url=self.server.url, api_key=self.api_key)
        model = client.create_lora_training_client(TINY_MODEL, rank=8, seed=self.seed % 1000).result()
        ending = Ending()
        waiting: list[tuple[types.APIFuture, types.APIFuture]] = []  # type: ignore[name-defined]
        for number in self._numbers():
            self._pause(ending, waiting)
            waiting.append(self._submit(model, number))
            ending.rounds += 1
            if len(waiting) > ROUNDS_AHEAD:
                self._take(ending, *waiting.pop(0))
            if number % SAMPLE_EVERY == SAMPLE_EVERY - 1:
                ending.drawn.append(self._sample(model, number))
        for pair in waiting:
            self._take(ending, *pair)
        ending.tensors = self._tensors(model.save_state("final").result().path)
        self._check_series(str(model.model_id), ending.rounds)
        client.close("success").result()
        return ending

    def _check_series(self, run_id: str, rounds: int) -> None:
        """Check that the series of the run has each step once."""
        url = f"{self.server.url}/api/v1/training_runs/{run_id}/metrics"
        answer = httpx.get(url, params={"limit": 10_000}, headers={"X-API-Key": self.api_key}, timeout=60)
        steps = [one["step"] for one in answer.raise_for_status().json()["steps"]]
        assert steps == list(range(1, rounds + 1)), f"{run_id} has the steps {steps} after {rounds} rounds"

    def _pause(self, ending: Ending, waiting: list[tuple]) -> None:  # type: ignore[type-arg]
        """Wait while the program is paused. A paused program takes its results before, and so is idle."""
        if self.progress.goes.is_set():
            return
        while waiting:
            self._take(ending, *waiting.pop(0))
        self.progress.goes.wait()

    def _numbers(self) -> Iterator[int]:
        if self.rounds is not None:
            yield from range(self.rounds)
            return
        for number in itertools.count():
            if self.stop.is_set():
                return
            yield number

    def _submit(self, model: tinker.TrainingClient, number: int) -> tuple:  # type: ignore[type-arg]
        return model.forward_backward(self._data(number), "cross_entropy"), model.optim_step(adam(1e-3))

    def _data(self, number: int) -> list[types.Datum]:
        """Return data of many lengths, so that an operation takes several microbatches, and may be preempted."""
        draw = random.Random(f"{self.seed} {self.name} {number}")
        lengths = [draw.choice((4, 9, 18, 40, 70)) for _ in range(draw.choice((1, 6, 24)))]
        return [next_token_datum([draw.randrange(16) for _ in range(length)]) for length in lengths]

    def _take(self, ending: Ending, forward: object, step: object) -> None:
        logprobs = exact_logprobs(forward.result())  # type: ignore[attr-defined]
        ending.answers.append([value for datum in logprobs for value in datum])
        metrics = step.result().metrics or {}  # type: ignore[attr-defined]
        ending.answers.append([metrics[name] for name in sorted(metrics)])
        self.progress.note()

    def _sample(self, model: tinker.TrainingClient, number: int) -> Numbers:
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, seed=number, temperature=1.0)
        drawn = sampler.sample(types.ModelInput.from_ints([5, 9, 2]), 2, params).result()
        return [number for one in drawn.sequences for number in (*one.tokens, *(one.logprobs or ()))]

    def _tensors(self, tinker_path: str) -> dict[str, NDArray[np.float32]]:
        [folder] = (self.server.data / "checkpoints" / checkpoint_run_folder(tinker_path)).iterdir()
        return {name: tensor for file in CHECKPOINT_FILES for name, tensor in load_file(folder / file).items()}


@dataclass(frozen=True)
class Killer:
    """Draws what comes next; progress decides when, so that every life of a process does something."""

    seed: int
    kills: int
    server: ServedInstallation
    progress: Progress

    def run(self) -> None:
        draw = random.Random(self.seed)
        for number in range(1, self.kills + 1):
            self.progress.wait_beyond(self.progress.answered + draw.randint(1, MOST_ANSWERS_BETWEEN))
            time.sleep(draw.uniform(0, LONGEST_DELAY_SECONDS))
            kind = draw.choice(FAULTS)
            print(
                json.dumps({"fault": number, "of": self.kills, "what": kind, "answered": self.progress.answered}),
                flush=True,
            )
            self._kill(kind)

    def _kill(self, kind: str) -> None:
        if kind in ("worker", "both"):
            self.server.kill_workers()
        if kind in ("server", "both"):
            self.server.kill()
            self.server.start()
        if kind == "idle":
            with self.progress.pause():
                self._wait_until_suspended()
        if kind == "clean stop":
            assert self.server.stop() == 0, "a clean stop ended badly"
            self.server.start()

    def _wait_until_suspended(self) -> None:
        """Wait until the idle worker has stopped. The programs' next calls start it again."""
        until = time.monotonic() + SUSPENSION_PATIENCE_SECONDS
        while self.server.worker_pids():
            assert time.monotonic() < until, "the idle worker was not suspended"
            time.sleep(0.1)


@dataclass(frozen=True)
class Plan:
    """The parts that all runs of one soak have in common."""

    folder: Path
    model: Path
    seed: int
    numerics: str


def play(plan: Plan, name: str, kills: int, rounds: Mapping[str, int] | None = None) -> dict[str, Ending]:
    """All programs in one installation; without `rounds`, until so many kills have come."""
    folder, seed = plan.folder / name, plan.seed
    settings = {**SETTINGS, "numerics": plan.numerics}
    server = ServedInstallation(folder, {TINY_MODEL: plan.model}, settings).start()
    progress, stop = Progress(), threading.Event()
    progress.goes.set()
    try:
        keys = {"ada": API_KEY, "bob": _new_key(folder)}
        programs = [
            Program(name, seed, server, keys[name.split("-")[0]], progress, stop, rounds[name] if rounds else None)
            for name in PROGRAMS
        ]
        with ThreadPoolExecutor(len(programs)) as threads:
            running = {program.name: threads.submit(program.run) for program in programs}
            try:
                Killer(seed, kills, server, progress).run()
            finally:
                stop.set()
            return {name: future.result() for name, future in running.items()}
    finally:
        server.stop()


def _new_key(data: Path) -> str:
    command = [
        str(Path(sys.executable).with_name("tinsmith")),
        "keys",
        "create",
        "--data",
        str(data),
        "--tenant",
        "bob",
    ]
    made = subprocess.run([*command, "--json", "soak"], check=True, capture_output=True, text=True)
    return str(json.loads(made.stdout)["key"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--numerics", choices=["exact", "fast"], default="exact")
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        plan = Plan(Path(folder), make_tiny_model(Path(folder) / "model"), asked.seed, asked.numerics)
        disturbed = play(plan, "disturbed", asked.kills)
        rounds = {name: ending.rounds for name, ending in disturbed.items()}
        undisturbed = play(plan, "undisturbed", 0, rounds)
        if asked.numerics == "exact":
            found = differences(disturbed, undisturbed)
        else:
            found = beyond_rounding(disturbed, undisturbed, play(plan, "again", 0, rounds))
    minutes = (time.monotonic() - started) / 60
    told = sum(len(ending.answers) + len(ending.drawn) for ending in disturbed.values())
    print(
        f"{asked.kills} kills, {sum(rounds.values())} rounds, {told} answers, {minutes:.0f} minutes, seed {asked.seed}"
    )
    if found:
        sys.exit("\n".join(found))
    how = "bit for bit" if asked.numerics == "exact" else "within the rounding of two undisturbed runs"
    print(f"every answer and every tensor is that of the undisturbed programs, {how}")


if __name__ == "__main__":
    main()
