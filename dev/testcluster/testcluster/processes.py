"""The processes of a cluster.

Each process runs in a separate session, and is recorded in a file. Before a process is ended, its identity is checked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.places import Places

# This variable marks child processes that outlive their parent, such as the shims of containers.
MARKER = "TINSMITH_CLUSTER_MEMBER"
# All these programs are written in Go, and would spend much time on garbage collection. Memory is plentiful.
_ENVIRONMENT = {"GOGC": "400"}
_POLL_SECONDS = 0.05
_END_SECONDS = 60.0


@dataclass(frozen=True)
class Running:
    """A process.

    The PID, the start tick and the boot ID identify a process. A later process with the same PID has a different start
    tick or boot ID.
    """

    pid: int
    start_ticks: int
    boot: str

    def is_alive(self) -> bool:
        return self == identify(self.pid)

    def send(self, number: signal.Signals) -> None:
        """Send the signal to exactly this process, or to no process.

        The identity is checked after a handle of the process has been opened.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.is_alive():
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)


def identify(pid: int) -> Running | None:
    """Return the process with this PID, or None if no such process exists or the process has ended.

    The first thread of a killed process ends before the other threads, which may still use a file.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may itself contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1):
        return None
    return Running(pid, int(fields[19]), _boot())


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def end(processes: Iterable[Running], number: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal to each process, and wait until all processes have ended.

    Raises ClusterError if a process still runs after a minute.
    """
    waiting = [process for process in processes if process.is_alive()]
    for process in waiting:
        process.send(number)
    deadline = time.monotonic() + _END_SECONDS
    while waiting := [process for process in waiting if process.is_alive()]:
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in waiting)
            raise ClusterError(f"Processes {pids} did not end within {_END_SECONDS:.0f} s of {number.name}.")
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class ProcessTable:
    """The processes of one cluster, by name. The processes are recorded in files, so that a later `down` finds them."""

    places: Places

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        network: Path | None = None,
    ) -> None:
        """Start `command` in a new session. If a network namespace is given, start the command in this namespace.

        The program nsenter is used, because `ip netns exec` would mount /sys again, and the kubelet would not find
        control groups.
        """
        self.places.logs.mkdir(parents=True, exist_ok=True)
        self.places.processes.mkdir(parents=True, exist_ok=True)
        entered = [] if network is None else ["nsenter", f"--net={network}"]
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(
                [*entered, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={**os.environ, **_ENVIRONMENT, **(environment or {}), MARKER: str(self.places.directory)},
                start_new_session=True,
            )
        running = identify(child.pid)
        # From here on the process belongs to the cluster. Otherwise this object would warn about it when it is deleted.
        child.returncode = 0
        if running is None:
            raise ClusterError(f"{name} ended at once.{self._last_words(name)}")
        self._file(name).write_text(json.dumps(asdict(running)))

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.places.processes.glob("*.json"))

    def running(self, name: str) -> Running:
        """Return the process with this name. Raises ClusterError if the process was never started."""
        try:
            return Running(**json.loads(self._file(name).read_text()))
        except (FileNotFoundError, json.JSONDecodeError) as error:
            raise ClusterError(f"Cluster {self.places.name} has no process {name}.") from error

    def is_alive(self, name: str) -> bool:
        return self.running(name).is_alive()

    def stop(self, *names: str) -> None:
        """End these processes and remove the records of the processes."""
        end(self.running(name) for name in names)
        for name in names:
            self._file(name).unlink()

    def log(self, name: str) -> Path:
        return self.places.logs / f"{name}.log"

    def wait_until(self, what: str, check: Callable[[], bool], *, needs: Sequence[str], seconds: float = 240.0) -> None:
        """Poll `check` until the result is true.

        Raises ClusterError if a process in `needs` has ended, and after a timeout.
        """
        deadline = time.monotonic() + seconds
        while not check():
            for name in needs:
                if not self.is_alive(name):
                    raise ClusterError(f"{name} ended before {what}.{self._last_words(name)}")
            if time.monotonic() > deadline:
                words = "".join(self._last_words(name) for name in needs)
                raise ClusterError(f"Waited {seconds:.0f} s until {what}, in vain.{words}")
            time.sleep(_POLL_SECONDS)

    def _file(self, name: str) -> Path:
        return self.places.processes / f"{name}.json"

    def _last_words(self, name: str, lines: int = 15) -> str:
        log = self.log(name)
        words = log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []
        return f"\nThe end of {log}:\n" + "\n".join(words)


def marked(directory: Path) -> list[Running]:
    """Return every descendant of the cluster's processes, found by an environment variable that children inherit."""
    wanted = f"{MARKER}={directory}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        running = identify(int(entry.name))
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if running is not None and wanted in environment.split(b"\0"):
            found.append(running)
    return found
