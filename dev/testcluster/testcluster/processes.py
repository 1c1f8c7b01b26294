"""The processes of a cluster: started apart from who starts them, written down, and ended only if still the same."""

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

# Children that a process leaves behind, such as the shims of containers, still carry this.
MARKER = "TINSMITH_CLUSTER_MEMBER"
# All of them are written in Go, and would spend a good part of their time on collecting garbage; memory is there.
_ENVIRONMENT = {"GOGC": "400"}
_POLL_SECONDS = 0.05
_END_SECONDS = 60.0


@dataclass(frozen=True)
class Running:
    """A process as it was when it started: a later one with the same pid started at another tick, or after a boot."""

    pid: int
    start_ticks: int
    boot: str

    def is_alive(self) -> bool:
        return self == identify(self.pid)

    def send(self, number: signal.Signals) -> None:
        """Reaches this process or none: the handle is taken before the look at who it is."""
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
    """Return the process of this PID; None when there is none, or only one that has ended.

    The first thread of a killed process ends before the others, which may still use a file.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces and parentheses of its own.
    fields = stat.rpartition(")")[2].split()
    if fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1):
        return None
    return Running(pid, int(fields[19]), _boot())


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def end(processes: Iterable[Running], number: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal to each process and wait until all are gone.

    Raises ClusterError when one remains after a minute.
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
    """The processes of one cluster by name, recorded in files so that a later `down` finds them."""

    places: Places

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        network: Path | None = None,
    ) -> None:
        """Start `command` in a session of its own, inside the network namespace if one is given.

        It uses nsenter, because `ip netns exec` mounts /sys anew and the kubelet then finds no control groups.
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
        # It belongs to the cluster from here on, not to this object, whose end would warn of it.
        child.returncode = 0
        if running is None:
            raise ClusterError(f"{name} ended at once.{self._last_words(name)}")
        self._file(name).write_text(json.dumps(asdict(running)))

    def names(self) -> list[str]:
        return sorted(file.stem for file in self.places.processes.glob("*.json"))

    def running(self, name: str) -> Running:
        """Return the process of this name. Raises ClusterError when none was ever started."""
        try:
            return Running(**json.loads(self._file(name).read_text()))
        except (FileNotFoundError, json.JSONDecodeError) as error:
            raise ClusterError(f"Cluster {self.places.name} has no process {name}.") from error

    def is_alive(self, name: str) -> bool:
        return self.running(name).is_alive()

    def stop(self, *names: str) -> None:
        """End these processes and forget them."""
        end(self.running(name) for name in names)
        for name in names:
            self._file(name).unlink()

    def log(self, name: str) -> Path:
        return self.places.logs / f"{name}.log"

    def wait_until(self, what: str, check: Callable[[], bool], *, needs: Sequence[str], seconds: float = 240.0) -> None:
        """Poll `check`. Raises ClusterError when a process that it `needs` has ended, or when time is up."""
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
    """Every process that descends from one of the cluster in `directory` and kept its environment."""
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
