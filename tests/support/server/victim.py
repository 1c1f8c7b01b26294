"""A tenant with small requests, in a process of its own, so that only the server keeps it waiting.

Run with `python -m support.server.victim PID PORT KEY SESSION`. It sends heartbeats one after the other. To each line
on its standard input it answers with how long the server worked while each of those since the line before waited.

In seconds of the server's CPU: those on a clock are other programs' as well, on a machine that tests keep busy.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator

SECONDS = 60.0


def heartbeats(pid: int, port: int, key: str, session_id: str) -> Iterator[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    # As clock_getcpuclockid(3) makes it.
    clock = (~pid << 3) | 2
    body = json.dumps({"session_id": session_id})
    while True:
        started = time.clock_gettime(clock)
        connection.request("POST", "/api/v1/session_heartbeat", body, {"X-API-Key": key})
        response = connection.getresponse()
        response.read()
        if response.status != http.HTTPStatus.OK:
            raise SystemExit(f"a heartbeat was answered {response.status}")
        yield time.clock_gettime(clock) - started


def main(pid: str, port: str, key: str, session_id: str) -> None:
    taken: list[float] = []
    asked = threading.Semaphore(0)
    threading.Thread(target=lambda: [asked.release() for _ in sys.stdin], daemon=True).start()
    for seconds in heartbeats(int(pid), int(port), key, session_id):
        taken.append(seconds)
        if asked.acquire(blocking=False):
            print(json.dumps(taken), flush=True)
            taken = []


if __name__ == "__main__":
    main(*sys.argv[1:])
