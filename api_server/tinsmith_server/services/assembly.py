"""The services of a server, which are created from a store, a fleet and settings."""

from __future__ import annotations

from functools import cached_property

from tinsmith_server.fleet.base import Changes, Fleet
from tinsmith_server.services.accounts.admission import Admission
from tinsmith_server.services.accounts.audit import AuditLog
from tinsmith_server.services.accounts.console_sessions import ConsoleSessions
from tinsmith_server.services.accounts.keys import Keys
from tinsmith_server.services.accounts.limits import Limits
from tinsmith_server.services.accounts.quotas import TenantQuotas
from tinsmith_server.services.accounts.sessions import Sessions, SessionSearch
from tinsmith_server.services.background.inspection import Capabilities, Inspection, Readiness
from tinsmith_server.services.background.leases import Leases
from tinsmith_server.services.background.reaper import LostWorkers, Reaper
from tinsmith_server.services.background.tasks import Background
from tinsmith_server.services.checkpoints.checkpoints import Checkpoints
from tinsmith_server.services.checkpoints.copies import Copies
from tinsmith_server.services.checkpoints.download_links import DownloadLinks
from tinsmith_server.services.checkpoints.files import CheckpointFiles, UploadFiles
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup
from tinsmith_server.services.checkpoints.promotions import Promotions
from tinsmith_server.services.checkpoints.retention import KeptCheckpoints, Retention
from tinsmith_server.services.checkpoints.search import CheckpointSearch
from tinsmith_server.services.checkpoints.worker_events import Events
from tinsmith_server.services.delivery import Delivery
from tinsmith_server.services.polling.futures import Futures
from tinsmith_server.services.polling.live_weights import LiveWeights
from tinsmith_server.services.polling.long_polls import LongPolls
from tinsmith_server.services.polling.results import Results
from tinsmith_server.services.polling.sample_polls import SamplePolls
from tinsmith_server.services.polling.texts import Texts
from tinsmith_server.services.pool_demand import PoolDemand
from tinsmith_server.services.recordings.recordings import Recordings
from tinsmith_server.services.runs.runs import Runs
from tinsmith_server.services.runs.series import RunSeries
from tinsmith_server.services.sampling.adapter_delivery import AdapterHints, SaveSources
from tinsmith_server.services.sampling.dispatch import Dispatch
from tinsmith_server.services.sampling.routing import SamplerLoads
from tinsmith_server.services.sampling.sampling import Sampling
from tinsmith_server.services.tokenizers import Tokenizers
from tinsmith_server.services.training.adapter_imports import AdapterImports
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.custom_losses import CustomLosses
from tinsmith_server.services.training.models import Models
from tinsmith_server.services.training.operation_bodies import OperationBodies
from tinsmith_server.services.training.operations import Operations
from tinsmith_server.services.training.placement import Placement
from tinsmith_server.services.training.submission import Submission
from tinsmith_server.services.training.submit_requests import SubmitRequests
from tinsmith_server.services.usage.collection import UsageCollection
from tinsmith_server.services.usage.reports import UsageReports
from tinsmith_server.services.usage.traces import Traces
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Clock
from tinsmith_server.store.store import Store


class Services:
    """The services of a server. Routes use only the services whose name has no underscore.

    Raises StartupError if the checkpoint root cannot be opened.
    """

    def __init__(self, settings: Settings, store: Store, fleet: Fleet, clock: Clock) -> None:
        self.settings = settings
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._files = CheckpointFiles(settings.checkpoints_url)
        self._uploads = UploadFiles(settings.checkpoints_url)
        self._freed = Changes()
        self._loads = SamplerLoads()
        self.limits = Limits(store, settings, clock)
        self._quotas = TenantQuotas(store, settings, self.limits)
        self.long_polls = LongPolls(settings.poll_hold_seconds)

    # ---- accounts

    @cached_property
    def keys(self) -> Keys:
        static_key = self.settings.api_key.get_secret_value() if self.settings.api_key else None
        return Keys(self._store, static_key, self._clock, required=self.settings.require_keys)

    @cached_property
    def console_sessions(self) -> ConsoleSessions:
        return ConsoleSessions(self._store, self.keys, self._clock)

    @cached_property
    def admission(self) -> Admission:
        return Admission(self.settings, self.keys, self.limits)

    def queued_operations(self, tenant: str) -> int:
        """Return the number of the tenant's queued operations, as far as this server knows them."""
        return self._quotas.queued.waiting(tenant)

    @cached_property
    def sessions(self) -> Sessions:
        return Sessions(self._store, self.settings.session_timeout_seconds, self._clock)

    @cached_property
    def session_search(self) -> SessionSearch:
        return SessionSearch(self._store)

    @cached_property
    def audit(self) -> AuditLog:
        return AuditLog(self._store, self._clock)

    @cached_property
    def usage(self) -> UsageReports:
        return UsageReports(self._store, self._clock)

    @cached_property
    def traces(self) -> Traces:
        return Traces(self._store, self._fleet, self.settings.external_url_seconds, self._clock)

    # ---- checkpoints

    @cached_property
    def _retention(self) -> Retention:
        return Retention(self._store, self._files, self.settings, self._clock)

    @cached_property
    def _events(self) -> Events:
        return Events(
            self._store, self._fleet, self._retention, self._delivery, self._freed, self._hints.announce, self._clock
        )

    @cached_property
    def _lookup(self) -> CheckpointLookup:
        return CheckpointLookup(self._store, self._events, self.keys, self._clock)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self._store, self._lookup, self._retention, self._clock)

    @cached_property
    def checkpoint_search(self) -> CheckpointSearch:
        return CheckpointSearch(self._store, self._clock)

    @cached_property
    def promotions(self) -> Promotions:
        return Promotions(self._store, self._fleet, self._lookup, self._clock)

    @cached_property
    def copies(self) -> Copies:
        return Copies(self._store, self._files, self._lookup, self._retention, self._quotas.checkpoints, self._clock)

    @cached_property
    def exports(self) -> DownloadLinks:
        return DownloadLinks(
            self._store, self.checkpoints, self._files, self.settings.external_url_seconds, self._clock
        )

    @cached_property
    def imports(self) -> AdapterImports:
        return AdapterImports(
            self._store,
            self._fleet,
            self._uploads,
            self._retention,
            self._quotas.checkpoints,
            self.settings,
            self._clock,
        )

    # ---- training

    @cached_property
    def _delivery(self) -> Delivery:
        return Delivery(self._store, self._fleet, self.limits.share_weight)

    @cached_property
    def binding(self) -> Binding:
        placement = Placement(self._store, self._fleet, self._freed, self.settings.places_for_others, self._clock)
        return Binding(self._store, self._fleet, placement, self._delivery)

    @cached_property
    def models(self) -> Models:
        return Models(
            store=self._store,
            fleet=self._fleet,
            sessions=self.sessions,
            binding=self.binding,
            lookup=self._lookup,
            adapters=self._quotas.adapters,
            describe=self.capabilities.of,
            settings=self.settings,
            clock=self._clock,
        )

    @cached_property
    def operations(self) -> Operations:
        return Operations(
            sessions=self.sessions,
            models=self.models,
            binding=self.binding,
            delivery=self._delivery,
            fleet=self._fleet,
            requests=self._submit_requests,
            submission=self._submission,
            queued=self._quotas.queued,
        )

    @cached_property
    def _submit_requests(self) -> SubmitRequests:
        return SubmitRequests(self._fleet, self._events, self._lookup, self._quotas.checkpoints)

    @cached_property
    def _submission(self) -> Submission:
        return Submission(self._store, self._delivery, self._submit_requests)

    @cached_property
    def operation_bodies(self) -> OperationBodies:
        return OperationBodies(self.admission, self.settings)

    @cached_property
    def custom_losses(self) -> CustomLosses:
        return CustomLosses(self.sessions)

    @cached_property
    def tokenizers(self) -> Tokenizers:
        return Tokenizers(self._fleet)

    @cached_property
    def runs(self) -> Runs:
        return Runs(self._store, self.binding, self.inspection, self._clock)

    @cached_property
    def run_series(self) -> RunSeries:
        limit = self.settings.reported_metrics_bytes_per_run
        return RunSeries(self._store, self.long_polls, limit, self._clock)

    # ---- sampling, and the results of polls

    @cached_property
    def _hints(self) -> AdapterHints:
        return AdapterHints(self._fleet, self._loads, self._save_sources)

    @cached_property
    def dispatch(self) -> Dispatch:
        return Dispatch(self._fleet, self._loads, self._save_sources)

    @cached_property
    def _save_sources(self) -> SaveSources:
        return SaveSources(self._fleet, streams=self.settings.stream_saves)

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling(
            store=self._store,
            fleet=self._fleet,
            sessions=self.sessions,
            lookup=self._lookup,
            promotions=self.promotions,
            dispatch=self.dispatch,
            hints=self._hints,
            in_flight=self._quotas.samples,
            clock=self._clock,
        )

    @cached_property
    def texts(self) -> Texts:
        return Texts(self._fleet, self.checkpoints, self.promotions, self.sampling, self.dispatch, self.long_polls)

    @cached_property
    def recordings(self) -> Recordings:
        memory, limit = self.admission.results, self.settings.recording_bytes_per_tenant
        return Recordings(self._store, self.texts, memory, limit, self._clock)

    @cached_property
    def futures(self) -> Futures:
        return Futures(
            models=self.models,
            submission=self._submission,
            custom_losses=self.custom_losses,
            sampling=self.sampling,
            binding=self.binding,
            fleet=self._fleet,
            events=self._events,
            long_polls=self.long_polls,
            hold_seconds=self.settings.poll_hold_seconds,
        )

    @cached_property
    def live_weights(self) -> LiveWeights:
        return LiveWeights(self.sampling, self.operations, self.futures)

    @cached_property
    def results(self) -> Results:
        return Results(self.futures, self.operations, self.sessions, self.admission)

    @cached_property
    def sample_polls(self) -> SamplePolls:
        return SamplePolls(
            sampling=self.sampling,
            dispatch=self.dispatch,
            fleet=self._fleet,
            in_flight=self._quotas.samples,
            long_polls=self.long_polls,
            hold_seconds=self.settings.poll_hold_seconds,
        )

    @cached_property
    def pool_demand(self) -> PoolDemand:
        return PoolDemand(self._fleet, self._clock)

    # ---- the server itself

    @cached_property
    def inspection(self) -> Inspection:
        return Inspection(self._store, self._fleet, self._loads, self._quotas.queued)

    @cached_property
    def capabilities(self) -> Capabilities:
        return Capabilities(self._fleet, self.inspection)

    @cached_property
    def _leases(self) -> Leases:
        return Leases(self._store, self._fleet)

    @cached_property
    def readiness(self) -> Readiness:
        return Readiness(self._store, self._fleet, self._leases.replica)

    @cached_property
    def _reaper(self) -> Reaper:
        return Reaper(
            store=self._store,
            fleet=self._fleet,
            sessions=self.sessions,
            binding=self.binding,
            delivery=self._delivery,
            submission=self._submission,
            events=self._events,
            freed=self._freed,
            settings=self.settings,
            clock=self._clock,
        )

    @cached_property
    def background(self) -> Background:
        return Background(
            store=self._store,
            fleet=self._fleet,
            leases=self._leases,
            sessions=self.sessions,
            binding=self.binding,
            events=self._events,
            submission=self._submission,
            reaper=self._reaper,
            lost_workers=LostWorkers(self._store, self._fleet),
            retention=self._retention,
            kept_checkpoints=KeptCheckpoints(self._store, self._retention, self.limits, self._clock),
            imports=self.imports,
            inspection=self.inspection,
            usage=UsageCollection(self._store, self._fleet, self._clock),
        )
