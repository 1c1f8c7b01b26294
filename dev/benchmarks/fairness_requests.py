"""Two tenants send small requests or create models. Only the API server, and no worker, handles such calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import tinker
from fairness_scenarios import MODEL, OF_A, Flood, Installation
from workloads import RANK

REQUESTS_ON_THEIR_WAY = 16
CREATES_ON_THEIR_WAY = 8


class PooledFlood(Flood):
    """A flood of calls. Each thread waits for the answer before the next call."""

    def __init__(self, call: Callable[[], object], pool: ThreadPoolExecutor, on_their_way: int) -> None:
        def submit() -> Future[object]:
            return pool.submit(call)

        super().__init__(submit, on_their_way=on_their_way, units_each=1)


@contextmanager
def flood_of(call: Callable[[], object], on_their_way: int) -> Iterator[Flood]:
    with ThreadPoolExecutor(on_their_way) as pool:
        yield PooledFlood(call, pool, on_their_way)


def timed(call: Callable[[], object]) -> Callable[[], float]:
    def request() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return request


@dataclass(frozen=True, slots=True)
class SmallBesideSmall:
    """Small requests of both tenants. Each request reads the info of a model, which uses the store but no worker."""

    unit: str = "requests"

    @contextmanager
    def flooding(self, installation: Installation) -> Iterator[Flood]:
        with (
            installation.session_of_a() as service,
            get_info(installation.url, OF_A, service) as call,
            flood_of(call, REQUESTS_ON_THEIR_WAY) as flood,
        ):
            yield flood

    @contextmanager
    def requesting(self, installation: Installation) -> Iterator[Callable[[], float]]:
        with installation.session_of_b() as service, get_info(installation.url, installation.key_of_b, service) as call:
            yield timed(call)


@contextmanager
def get_info(url: str, key: str, service: tinker.ServiceClient) -> Iterator[Callable[[], object]]:
    """Yield a function that reads the info of a model by plain HTTP.

    The SDK would use several times the server's CPU time.
    """
    model = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
    body = {"model_id": model.model_id}
    limits = httpx.Limits(max_connections=REQUESTS_ON_THEIR_WAY)
    with httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, limits=limits, trust_env=False) as client:
        yield lambda: client.post("/get_info", json=body).raise_for_status()


@dataclass(frozen=True, slots=True)
class CreateBesideCreates:
    """Model creations of both tenants. Each creation has a separate session, which ends as soon as the model exists."""

    unit: str = "models"

    @contextmanager
    def flooding(self, installation: Installation) -> Iterator[Flood]:
        with flood_of(lambda: make_a_model(installation.url, OF_A), CREATES_ON_THEIR_WAY) as flood:
            yield flood

    @contextmanager
    def requesting(self, installation: Installation) -> Iterator[Callable[[], float]]:
        yield lambda: make_a_model(installation.url, installation.key_of_b)


def make_a_model(url: str, key: str) -> float:
    """Return the seconds from the call until the model exists."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    started = time.perf_counter()
    service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
    seconds = time.perf_counter() - started
    service.close("success").result()
    return seconds
