"""The ASGI application: routes, middleware and lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import PlainTextResponse
from fastapi.telemetry import TelemetryConfig
from tinsmith_rpc import tracing

from tinsmith_server.configuration import load_settings, make_data_directory
from tinsmith_server.errors import StartupError
from tinsmith_server.fleet import fleet_of
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.metrics.server import CONTENT_TYPE, Metrics
from tinsmith_server.metrics.workers import DescribedWorker
from tinsmith_server.routes import (
    checkpoints,
    futures,
    package_folders,
    pages,
    promotions,
    runs,
    sampling,
    service,
    sessions,
    training,
    usage,
)
from tinsmith_server.routes.administration import keys, tenants, workers
from tinsmith_server.routes.console import session
from tinsmith_server.routes.console.cookies import ConsoleCookies
from tinsmith_server.routes.dialects import anthropic, openai, recordings
from tinsmith_server.routes.dialects.requests import ShortPaths
from tinsmith_server.routes.external_scaler import serving_scaler
from tinsmith_server.routes.http.middleware import (
    METRICS_PATH,
    AddressLimit,
    ConcurrencyLimit,
    HeadRequests,
    LoopbackOnly,
    Observing,
    PageAuth,
    Tracing,
)
from tinsmith_server.routes.http.openapi import install_openapi
from tinsmith_server.routes.http.problems import install_problem_handlers
from tinsmith_server.services.assembly import Services
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Clock
from tinsmith_server.store.store import database_clock, open_store

# FastAPI looks up OpenTelemetry's providers at each request, which takes a sixteenth of the request's time. This server
# sets no provider.
NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}


_OUTSIDE_THE_API = APIRouter(tags=["service"])
_OUTSIDE_THE_API.add_api_route("/health", service.health, summary="Whether the server answers")
_OUTSIDE_THE_API.routes.extend([*pages.router.routes, *session.router.routes])

# Starlette compares a path with these routers in order, so the most frequent calls come first.
ROUTERS: tuple[APIRouter, ...] = (
    futures.router,
    sampling.router,
    training.router,
    sessions.router,
    service.router,
    checkpoints.router,
    runs.router,
    promotions.router,
    usage.router,
    keys.router,
    tenants.router,
    workers.router,
    openai.router,
    recordings.agents,
    recordings.router,
    anthropic.router,
    openai.elsewhere,
    anthropic.elsewhere,
)
# FastAPI would rebuild the routes of an included router at the first requests. It uses these routes unchanged.
ROUTES = [route for router in ROUTERS for route in router.routes]


def create_app(
    settings: Settings | None = None,
    fleet: Fleet | None = None,
    clock: Clock | None = None,
) -> FastAPI:
    """Return the server as an ASGI application.

    By default, `settings` come from the environment, `fleet` is the fleet that the settings name, and `clock` is the
    database's clock, which all replicas share.

    While the lifespan runs, `app.state` holds `services`. If the server created the first key of an installation,
    `app.state` also holds `first_key`. If the lifespan could not start, `app.state` holds the error as `startup_error`.

    Raises StartupError if a setting is invalid, or a file in a setting does not exist.
    """
    settings = settings or load_settings({})
    metrics = Metrics()
    app = FastAPI(
        title="Tinsmith",
        summary="The Tinker training API on your own machines.",
        version=pages.VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=pages.OPENAPI_PATH,
        description="Paths below /oai/api/v1 and /anthropic/api/v1 are also served below /v1.",
        lifespan=_lifespan(settings, fleet or fleet_of(settings), metrics, clock),
        telemetry=NO_TELEMETRY,
        routes=[
            *ROUTES,
            *_OUTSIDE_THE_API.routes,
            *package_folders.console_files(package_folders.BUNDLE).routes,
            *package_folders.manual_pages(package_folders.SITE).routes,
        ],
    )
    app.add_api_route(
        METRICS_PATH,
        _metrics_page(metrics),
        tags=["service"],
        summary="Metrics for Prometheus",
        response_class=PlainTextResponse,
    )
    app.add_middleware(HeadRequests)
    app.add_middleware(ShortPaths)
    app.add_middleware(ConcurrencyLimit)
    guarded = {*pages.DOCS_PATHS, pages.OPENAPI_PATH, METRICS_PATH, *package_folders.manual_paths(package_folders.SITE)}
    app.add_middleware(PageAuth, settings=settings, pages=guarded)
    if settings.require_keys:
        app.add_middleware(ConsoleCookies)
    app.add_middleware(AddressLimit, settings=settings)
    if not settings.require_keys:
        app.add_middleware(LoopbackOnly)
    if tracing.is_requested():
        app.add_middleware(Tracing)
    app.add_middleware(Observing, metrics=metrics, pages=frozenset({pages.OPENAPI_PATH}))
    install_problem_handlers(app)
    install_openapi(app)
    return app


def release_polls(app: FastAPI) -> None:
    """Release held polls, so that a stopping server does not wait for them."""
    app.state.services.long_polls.release()


def _metrics_page(metrics: Metrics) -> Callable[[], Response]:
    def page() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return page


def _lifespan(
    settings: Settings, fleet: Fleet, metrics: Metrics, clock: Clock | None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.startup_error = None
        async with AsyncExitStack() as opened:
            try:
                if settings.keeps_data_here:
                    make_data_directory(settings.data)
                store = await open_store(settings.store_url)
                opened.push_async_callback(store.close)
                opened.push_async_callback(fleet.close)
                start_tracing()
                opened.callback(tracing.stop)
                await fleet.open(store)
                time_of_store = await opened.enter_async_context(database_clock(store))
                services = Services(settings, store, fleet, clock or time_of_store)
                app.state.services = services
                app.state.first_key = await services.keys.create_first()
                await opened.enter_async_context(serving_scaler(settings, services.pool_demand))
            except Exception as error:
                app.state.startup_error = error
                raise
            _watch(metrics, services, fleet)
            async with _at_work(services):
                yield

    return lifespan


def start_tracing() -> None:
    """Begin to export traces if the environment asks for them. Raises StartupError if the packages are missing."""
    try:
        tracing.start("tinsmith-server")
    except tracing.TracingUnavailable as error:
        raise StartupError(str(error)) from error


def _watch(metrics: Metrics, services: Services, fleet: Fleet) -> None:
    inspection = services.inspection

    def described() -> list[DescribedWorker]:
        return [
            DescribedWorker(handle.base_model, handle.name, reply)
            for handle in inspection.handles
            if (reply := inspection.workers.get(handle.sampler_id)) is not None
        ]

    metrics.watch(described, lambda: inspection.rows, lambda: len(services.long_polls))
    metrics.watch_sampling(services.dispatch.figures)


@asynccontextmanager
async def _at_work(services: Services) -> AsyncIterator[None]:
    await services.binding.resume()
    await services.background.start()
    try:
        yield
    finally:
        services.long_polls.release()
        await services.background.stop()
        await services.binding.close()
