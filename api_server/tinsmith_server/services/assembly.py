"""All services, built once per server from a store, a fleet and settings."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_server.fleet.base import Changes, Fleet
from tinsmith_server.services.accounts.admission import Admission
from tinsmith_server.services.accounts.audit import AuditLog
from tinsmith_server.services.accounts.holdings import Holdings
from tinsmith_server.services.accounts.keys import Keys
from tinsmith_server.services.accounts.session_search import SessionSearch
from tinsmith_server.services.accounts.sessions import Sessions
from tinsmith_server.services.background.inspection import Capabilities, Inspection, Readiness
from tinsmith_server.services.background.leases import Leases
from tinsmith_server.services.background.reaper import LostWorkers, Reaper
from tinsmith_server.services.background.tasks import Background
from tinsmith_server.services.checkpoints.checkpoints import Checkpoints
from tinsmith_server.services.checkpoints.copies import Copies
from tinsmith_server.services.checkpoints.download_links import DownloadLinks
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup
from tinsmith_server.services.checkpoints.retention import Retention
from tinsmith_server.services.checkpoints.upload_files import UploadFiles
from tinsmith_server.services.checkpoints.worker_events import Events
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.services.polling.futures import Futures
from tinsmith_server.services.polling.long_polls import LongPolls
from tinsmith_server.services.polling.texts import Texts
from tinsmith_server.services.sampling.adapter_hints import AdapterHints
from tinsmith_server.services.sampling.dispatch import Dispatch
from tinsmith_server.services.sampling.routing import SamplerLoads
from tinsmith_server.services.sampling.sampling import Sampling
from tinsmith_server.services.training.adapter_imports import AdapterImports
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.models import Models
from tinsmith_server.services.training.operations import Operations
from tinsmith_server.services.training.placement import Placement
from tinsmith_server.services.training.submit_requests import SubmitRequests
from tinsmith_server.services.usage.collection import UsageCollection
from tinsmith_server.services.usage.reports import UsageReports
from tinsmith_server.services.usage.traces import Traces
from tinsmith_server.settings import Settings
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import Clock, utc_now


@dataclass(frozen=True, slots=True)
class Services:
    """What routes call."""

    settings: Settings
    keys: Keys
    sessions: Sessions
    session_search: SessionSearch
    models: Models
    operations: Operations
    sampling: Sampling
    dispatch: Dispatch
    texts: Texts
    futures: Futures
    checkpoints: Checkpoints
    copies: Copies
    exports: DownloadLinks
    imports: AdapterImports
    capabilities: Capabilities
    inspection: Inspection
    readiness: Readiness
    binding: Binding
    background: Background
    long_polls: LongPolls
    admission: Admission
    usage: UsageReports
    audit: AuditLog
    traces: Traces


def build_services(settings: Settings, store: Store, fleet: Fleet, clock: Clock = utc_now) -> Services:
    files = CheckpointFiles(settings.checkpoints_url)
    retention = Retention(store, files, settings, clock)
    delivery = Delivery(store, fleet)
    freed = Changes()
    loads = SamplerLoads()
    hints = AdapterHints(fleet, loads)
    events = Events(store, fleet, retention, delivery, freed, hints.tell)
    static_key = settings.api_key.get_secret_value() if settings.api_key else None
    keys = Keys(store, static_key, clock)
    lookup = CheckpointLookup(store, events, keys, clock)
    sessions = Sessions(store, clock)
    holdings = Holdings(store, settings)
    placement = Placement(store, fleet, freed, settings.places_for_others, clock)
    binding = Binding(store, fleet, placement, delivery)
    models = Models(
        store=store,
        fleet=fleet,
        sessions=sessions,
        binding=binding,
        lookup=lookup,
        adapters=holdings.adapters,
        settings=settings,
        clock=clock,
    )
    requests = SubmitRequests(fleet, events, lookup, holdings.checkpoints)
    dispatch = Dispatch(fleet, loads)
    sampling = Sampling(
        store=store,
        fleet=fleet,
        sessions=sessions,
        lookup=lookup,
        dispatch=dispatch,
        hints=hints,
        in_flight=holdings.samples,
        clock=clock,
    )
    checkpoints = Checkpoints(store, lookup, retention, clock)
    inspection = Inspection(store, fleet, loads, holdings.queued)
    reaper = Reaper(
        store=store,
        fleet=fleet,
        sessions=sessions,
        binding=binding,
        delivery=delivery,
        events=events,
        freed=freed,
        settings=settings,
        clock=clock,
    )
    uploads = UploadFiles(settings.checkpoints_url)
    imports = AdapterImports(store, fleet, uploads, holdings.checkpoints, settings, clock)
    long_polls = LongPolls()
    leases = Leases(store, fleet)
    return Services(
        settings=settings,
        keys=keys,
        sessions=sessions,
        session_search=SessionSearch(store),
        models=models,
        operations=Operations(sessions, models, binding, delivery, fleet, requests, holdings.queued),
        sampling=sampling,
        dispatch=dispatch,
        texts=Texts(fleet, checkpoints, sampling, dispatch, long_polls),
        futures=Futures(models, sampling, binding, fleet, events, long_polls, settings.poll_hold_seconds),
        checkpoints=checkpoints,
        imports=imports,
        copies=Copies(store, files, lookup, holdings.checkpoints, clock),
        exports=DownloadLinks(store, checkpoints, files, settings.external_url_seconds, clock),
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
            imports=imports,
            inspection=inspection,
            usage=UsageCollection(store, fleet, clock),
        ),
        long_polls=long_polls,
        admission=Admission.of(settings),
        usage=UsageReports(store, clock),
        audit=AuditLog(store, clock),
        traces=Traces(store, fleet, settings.external_url_seconds, clock),
    )
