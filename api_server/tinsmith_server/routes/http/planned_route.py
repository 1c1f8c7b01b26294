"""Routes that resolve their dependencies only once, at start.

At each request, FastAPI walks the tree of an endpoint's dependencies, and validates an answer that already has the type
of its response model. The walk and the validation together take a quarter of the time of a small request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.routing import request_response
from typing_extensions import override

Handler: TypeAlias = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class _Step:
    """A call of one dependency. `takes` maps each parameter to the number of the step that computes its value."""

    call: Callable[..., Any]
    takes: tuple[tuple[str, int], ...]
    request: str | None
    response: str | None
    opens: bool


class PlannedRoute(APIRoute):
    """A route that resolves its dependencies only once, at start.

    This class can plan an endpoint that returns a response or its response model. FastAPI itself runs endpoints with
    parameters of their own, another status, or another result. FastAPI also runs the routes of an included router,
    because it adds the dependencies of the router. A generator dependency is closed before the answer is sent.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.is_planned:
            self.app = request_response(self.around(self._planned_handler()))

    @property
    def is_planned(self) -> bool:
        return self.status_code is None and _is_model(self.response_model) and _is_plain(self.dependant)

    def around(self, handle: Handler) -> Handler:
        """Return `handle`. A subclass may extend `handle`, for example with another format of errors."""
        return handle

    @override
    def get_route_handler(self) -> Handler:
        return self.around(super().get_route_handler())

    def _planned_handler(self) -> Handler:
        steps, exclude_none = plan(self.dependant), self.response_model_exclude_none
        sets_headers = any(step.response is not None for step in steps)
        run = _run_closing if any(step.opens for step in steps) else _run

        async def handle(request: Request) -> Response:
            extra = Response() if sets_headers else None
            result = await run(steps, request, extra)
            if isinstance(result, Response):
                return result
            content = result.model_dump_json(exclude_none=exclude_none)
            return Response(content, headers=_extra_headers(extra) if extra else None, media_type="application/json")

        return handle


def plan(endpoint: Dependant) -> Sequence[_Step]:
    """Return one step for each dependency, and the step of the endpoint last.

    The step of a dependency comes after the steps of all dependencies that it needs.
    """
    steps: list[_Step] = []
    numbers: dict[Callable[..., Any], int] = {}

    def add(one: Dependant) -> int:
        assert one.call is not None
        if one.call not in numbers:
            made = [(dependency.name, add(dependency)) for dependency in one.dependencies]
            takes = tuple((name, number) for name, number in made if name is not None)
            opens = inspect.isasyncgenfunction(one.call)
            call = asynccontextmanager(one.call) if opens else one.call
            request = one.request_param_name or one.http_connection_param_name
            steps.append(_Step(call, takes, request, one.response_param_name, opens))
            numbers[one.call] = len(steps) - 1
        return numbers[one.call]

    add(endpoint)
    return steps


def _is_model(response_model: object) -> bool:
    """Return whether the endpoint returns a model or, if `response_model` is None, a response."""
    return response_model is None or (isinstance(response_model, type) and issubclass(response_model, BaseModel))


def _is_plain(one: Dependant) -> bool:
    """Return whether the dependency and its own dependencies read no parameters and need no thread."""
    parameters = (one.path_params, one.query_params, one.header_params, one.cookie_params, one.body_params)
    others = (one.websocket_param_name, one.background_tasks_param_name, one.security_scopes_param_name)
    awaited = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return (
        not any(parameters)
        and not any(others)
        and any(check(call) for check in awaited for call in (one.call, getattr(one.call, "__call__", None)))  # noqa: B004
        and one.use_cache
        and all(_is_plain(dependency) for dependency in one.dependencies)
    )


async def _run(steps: Sequence[_Step], request: Request, extra: Response | None) -> Response | BaseModel:
    made: list[Any] = []
    for step in steps:
        made.append(await step.call(**_arguments(step, made, request, extra)))
    result: Response | BaseModel = made[-1]
    return result


async def _run_closing(steps: Sequence[_Step], request: Request, extra: Response | None) -> Response | BaseModel:
    """Run the steps, and close the generators among the steps at the end."""
    made: list[Any] = []
    async with AsyncExitStack() as opened:
        for step in steps:
            outcome = step.call(**_arguments(step, made, request, extra))
            made.append(await (opened.enter_async_context(outcome) if step.opens else outcome))
    result: Response | BaseModel = made[-1]
    return result


def _arguments(step: _Step, made: Sequence[Any], request: Request, extra: Response | None) -> dict[str, Any]:
    arguments = {name: made[number] for name, number in step.takes}
    if step.request is not None:
        arguments[step.request] = request
    if step.response is not None:
        arguments[step.response] = extra
    return arguments


def _extra_headers(extra: Response) -> dict[str, str]:
    """Return the headers that dependencies have set."""
    return {name: value for name, value in extra.headers.items() if name != "content-length"}
