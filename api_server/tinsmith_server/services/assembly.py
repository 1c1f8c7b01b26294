"""All services, built once per server from a store, a fleet and settings."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_server.fleet.base import Fleet
from tinsmith_server.services.background import Background
from tinsmith_server.services.binding import Binding
from tinsmith_server.services.capabilities import Capabilities
from tinsmith_server.services.checkpoints import Checkpoints
from tinsmith_server.services.clock import Clock, utc_now
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.services.dispatch import Dispatch
from tinsmith_server.services.events import Events
from tinsmith_server.services.exports import Exports
from tinsmith_server.services.files import CheckpointFiles
from tinsmith_server.services.futures import Futures
from tinsmith_server.services.holds import Holds
from tinsmith_server.services.inspection import Inspection
from tinsmith_server.services.keys import Keys
from tinsmith_server.services.leases import Leases
from tinsmith_server.services.loads import Loads
from tinsmith_server.services.lookup import CheckpointLookup
from tinsmith_server.services.lost_workers import LostWorkers
from tinsmith_server.services.models import Models
from tinsmith_server.services.operations import Operations
from tinsmith_server.services.payloads import Payloads
from tinsmith_server.services.placement import Placement
from tinsmith_server.services.readiness import Readiness
from tinsmith_server.services.reaper import Reaper
from tinsmith_server.services.retention import Retention
from tinsmith_server.services.sampling import Sampling
from tinsmith_server.services.sessions import Sessions
from tinsmith_server.settings import Settings
from tinsmith_server.store.base import Store


@dataclass(frozen=True, slots=True)
class Services:
    """What routes call."""

    settings: Settings
    keys: Keys
    sessions: Sessions
    models: Models
    operations: Operations
    sampling: Sampling
    dispatch: Dispatch
    futures: Futures
    checkpoints: Checkpoints
    exports: Exports
    capabilities: Capabilities
    inspection: Inspection
    readiness: Readiness
    binding: Binding
    background: Background
    holds: Holds


def build_services(settings: Settings, store: Store, fleet: Fleet, clock: Clock = utc_now) -> Services:
    files = CheckpointFiles(settings.checkpoints_url)
    retention = Retention(store, files, settings, clock)
    delivery = Delivery(store, fleet)
    events = Events(store, fleet, retention, delivery)
    lookup = CheckpointLookup(store, events, clock)
    sessions = Sessions(store, clock)
    binding = Binding(store, Placement(store, fleet), delivery)
    models = Models(store, fleet, sessions, binding, lookup, settings, clock)
    loads = Loads()
    dispatch = Dispatch(fleet, loads)
    sampling = Sampling(store, fleet, sessions, lookup, dispatch, clock)
    checkpoints = Checkpoints(store, models, lookup, retention, clock)
    inspection = Inspection(store, fleet, loads)
    reaper = Reaper(
        store=store,
        fleet=fleet,
        sessions=sessions,
        binding=binding,
        delivery=delivery,
        events=events,
        settings=settings,
        clock=clock,
    )
    holds = Holds()
    leases = Leases(store, fleet)
    static_key = settings.api_key.get_secret_value() if settings.api_key else None
    return Services(
        settings=settings,
        keys=Keys(store, static_key, clock),
        sessions=sessions,
        models=models,
        operations=Operations(sessions, models, binding, delivery, fleet, Payloads(fleet, events, lookup)),
        sampling=sampling,
        dispatch=dispatch,
        futures=Futures(models, sampling, binding, fleet, events, holds, settings.poll_hold_seconds),
        checkpoints=checkpoints,
        exports=Exports(store, checkpoints, files, settings.external_url_seconds, clock),
        capabilities=Capabilities(fleet, inspection),
        inspection=inspection,
        readiness=Readiness(store, fleet, leases.replica),
        binding=binding,
        background=Background(
            store=store,
            fleet=fleet,
            leases=leases,
            sessions=sessions,
            binding=binding,
            events=events,
            reaper=reaper,
            lost_workers=LostWorkers(store, fleet),
            retention=retention,
            inspection=inspection,
        ),
        holds=holds,
    )
