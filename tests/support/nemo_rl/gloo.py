"""Ranks of a process group on this machine: N processes that speak gloo and run a test's functions.

    with GlooRanks(2) as ranks:
        losses = ranks.run(train_some_steps, "qwen3")   # one result per rank, in order

A function is named by its module, so it must be one that a child can import: of `support`, or of the test's own file.
Arguments and results are pickled; tensors travel by value.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[3]

# Imported once, in the process that all ranks are forked from: each import of them takes seconds.
PRELOADED = (
    "torch.distributed",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "tinsmith_trainer.engines.megatron.model.gpt_model",
    "tinsmith_trainer.torch_model.loading",
)

# One thread per rank, since ranks share the cores; gloo on the loopback, whatever the machine's name resolves to.
RANK_ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    # Virtual machines can offer AMX, which oneDNN takes for bfloat16, and kill who uses it.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    # Megatron warns in every process of what it would have on a GPU.
    "PYTHONWARNINGS": "ignore",
}

START_SECONDS = 240.0
# The first one imports, and builds a model, with all ranks on few processors.
CALL_SECONDS = 240.0
# How long the other ranks may take to tell of their own errors, once one has failed.
GRACE_SECONDS = 10.0


class RankTraceback(Exception):
    """The place on a rank where an error was raised; the cause of the error that `run` raises."""


class RanksHang(AssertionError):
    """Ranks did not answer within the deadline; they have been killed."""


class RankDied(AssertionError):
    """A rank's process ended in the middle of a call."""


@dataclass(frozen=True, slots=True)
class _Answer(Generic[T]):
    result: T | None = None
    error: BaseException | None = None
    where: str = ""


class GlooRanks:
    """Ranks that stay up for several calls, in a process group of their own. A context manager."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = Path(tempfile.mkdtemp(prefix="gloo-"))
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        _start_fork_server()
        try:
            for rank in range(world_size):
                self._start(rank)
            self._answers(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("forkserver")
        parent_end, child_end = context.Pipe()
        store = str(self._folder / "store")
        process = context.Process(target=_serve, args=(child_end, rank, self.world_size, store), daemon=True)
        process.start()
        child_end.close()
        self._processes.append(process)
        self._connections.append(parent_end)

    def run(self, function: Callable[..., T], *arguments: Any, timeout_seconds: float = CALL_SECONDS) -> list[T]:
        """Call `function(*arguments)` on every rank, and return the results by rank.

        Raises the error of the first rank that had one, its cause being the place. When some ranks neither answer nor
        fail, they wait for each other, and all are killed.
        """
        return self.run_each(function, [arguments] * self.world_size, timeout_seconds=timeout_seconds)

    def run_each(
        self, function: Callable[..., T], arguments: list[tuple[Any, ...]], *, timeout_seconds: float = CALL_SECONDS
    ) -> list[T]:
        """Call the function on every rank, with arguments for each rank."""
        for link, own in zip(self._connections, arguments, strict=True):
            link.send_bytes(pickle.dumps((function, own)))
        answers: list[_Answer[T]] = self._answers(timeout_seconds)
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                raise answer.error from RankTraceback(f"on rank {rank}:\n{answer.where}")
        return [cast(T, answer.result) for answer in answers]

    def _answers(self, timeout_seconds: float) -> list[Any]:
        """One answer per rank; once one has failed, what the others say in a short time. Kills the silent ones."""
        answers: dict[int, _Answer[Any]] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(answers) < self.world_size:
            open_links = {link: rank for rank, link in enumerate(self._connections) if rank not in answers}
            ready = connection.wait(list(open_links), max(0.0, deadline - time.monotonic()))
            if not ready:
                return self._give_up(answers, timeout_seconds)
            for link in ready:
                rank = open_links[cast(Connection, link)]
                answers[rank] = self._receive(rank)
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [answers[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int) -> _Answer[Any]:
        try:
            answer: _Answer[Any] = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(START_SECONDS)  # it is ending: its link is closed
            code = self._processes[rank].exitcode
            self.close()
            raise RankDied(
                f"Rank {rank} of {self.world_size} ended with code {code} in the middle of a call."
            ) from None
        return answer

    def _give_up(self, answers: Mapping[int, _Answer[Any]], timeout_seconds: float) -> list[Any]:
        self.close()
        failed = {rank: answer for rank, answer in answers.items() if answer.error is not None}
        if not failed:
            silent = sorted(set(range(self.world_size)) - set(answers))
            raise RanksHang(f"Ranks {silent} of {self.world_size} did not answer within {timeout_seconds:g} s.")
        return [failed.get(rank, _Answer()) for rank in range(self.world_size)]

    def close(self) -> None:
        """Kills the ranks: nothing of theirs outlives the test."""
        for link in self._connections:
            link.close()
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_on_ranks(
    world_size: int, function: Callable[..., T], *arguments: Any, timeout_seconds: float = CALL_SECONDS
) -> list[T]:
    """One call on ranks of its own; see `GlooRanks.run`."""
    with GlooRanks(world_size) as ranks:
        return ranks.run(function, *arguments, timeout_seconds=timeout_seconds)


def _start_fork_server() -> None:
    """Once per test run. Its children inherit its environment, not that of the test that asks for them."""
    with _environment(RANK_ENVIRONMENT):
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(link: Connection, rank: int, world_size: int, store: str) -> None:
    """Run a rank: join the group, then serve one call after the other until the test closes the link."""
    import torch
    import torch.distributed

    sys.path.append(str(REPOSITORY))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    link.send_bytes(pickle.dumps(_Answer()))
    with suppress(EOFError, ConnectionError):
        while True:
            link.send_bytes(_answer(link.recv_bytes()))


def _answer(request: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(request)
        return pickle.dumps(_Answer(function(*arguments)))
    except BaseException as error:
        return _picklable(error)


def _picklable(error: BaseException) -> bytes:
    where = traceback.format_exc()
    try:
        answer = pickle.dumps(_Answer(error=error, where=where))
        pickle.loads(answer)
    except Exception:
        return pickle.dumps(_Answer(error=RuntimeError(f"{type(error).__name__}: {error}"), where=where))
    return answer
