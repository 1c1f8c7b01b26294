"""Commands that other threads send to the sampler's thread, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome
from tinsmith_trainer.sampling.builtin.adapters import LoadedAdapter


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted job. The submission fixes the adapter version: later loads and drops have no effect on the job.

    `adapter` is None if no adapter with the job's key was loaded.
    """

    job: SampleJob
    adapter: LoadedAdapter | None
    done: Callable[[SampleOutcome], None]


@dataclass(slots=True)
class Commands:
    """The commands since the last call of `take`."""

    submissions: list[Submission] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    dropped: list[LoadedAdapter] = field(default_factory=list)
    closing: bool = False

    def __bool__(self) -> bool:
        return bool(self.submissions or self.cancelled or self.dropped or self.closing)


class Intake:
    """A mailbox for commands, with one reader."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands = Commands()
        self._closed = False
        self._submitted = 0

    def submit(self, submission: Submission) -> bool:
        """Submit a job. Return False if the sampler is closed."""
        with self._changed:
            if self._closed:
                return False
            self._commands.submissions.append(submission)
            self._submitted += 1
            self._changed.notify()
            return True

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._commands.cancelled.add(request_id)
            self._changed.notify()

    def drop(self, adapter: LoadedAdapter) -> None:
        with self._changed:
            self._commands.dropped.append(adapter)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = self._commands.closing = True
            self._changed.notify()

    def take(self, *, wait: bool) -> Commands:
        """Return all commands. With `wait`, block until a command arrives."""
        with self._changed:
            while wait and not self._commands:
                self._changed.wait()
            commands, self._commands = self._commands, Commands()
            return commands

    def submitted(self) -> int:
        """Return the number of submitted jobs since the start."""
        with self._changed:
            return self._submitted
