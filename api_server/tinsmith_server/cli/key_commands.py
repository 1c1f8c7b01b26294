"""`tinsmith keys`: commands that change the store directly. The commands do not need a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import typer

from tinsmith_server.configuration import load_settings, make_data_directory
from tinsmith_server.errors import StartupError, TinsmithError
from tinsmith_server.services.accounts.callers import COMMAND_LINE, DEFAULT_TENANT, act_as
from tinsmith_server.services.accounts.keys import Keys, check_tenant_name
from tinsmith_server.settings import Settings
from tinsmith_server.store.connection import parse_store_url
from tinsmith_server.store.records import ApiKey, Role
from tinsmith_server.store.store import Store, open_store

T = TypeVar("T")

keys = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)

Data = Annotated[Path | None, typer.Option(help="The server's data directory.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="The server's database, if not in its data directory.")]
Config = Annotated[Path | None, typer.Option(help="The server's configuration file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value, for scripts.")]


@keys.command("create")
def create(
    name: Annotated[str | None, typer.Argument(help="Purpose of the key.")] = None,
    tenant: Annotated[str, typer.Option(help="Tenant that the key belongs to.")] = DEFAULT_TENANT,
    role: Annotated[
        Role, typer.Option(help="reader: looks only; member: also trains and samples; admin: also manages tenants.")
    ] = "member",
    data: Data = None,
    database_url: DatabaseUrl = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Create a key. The secret of the key is shown only once."""
    if name is not None and not name.strip():
        typer.echo("tinsmith keys: the name is empty; say what the key is for, or leave it out", err=True)
        raise typer.Exit(2)
    _check_tenant(tenant)
    made = _with_keys(
        data, database_url, config, lambda service: service.create(tenant, name or "", role), may_make_store=True
    )
    if as_json:
        print_json({**_fields(made.record), "key": made.secret})
    else:
        typer.echo(made.secret)
        number = made.record.key_id
        typer.echo(f"key {number}, shown only this once; revoke it with `tinsmith keys revoke {number}`", err=True)


@keys.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's keys.")] = None,
    data: Data = None,
    database_url: DatabaseUrl = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show all keys, without their secrets."""
    found = _with_keys(data, database_url, config, lambda service: service.list(tenant))
    if as_json:
        print_json([_fields(key) for key in found])
        return
    typer.echo("ID\tKEY\tTENANT\tROLE\tMADE\tSTATE\tNAME")
    for key in found:
        state = f"revoked {key.revoked_at:%Y-%m-%d}" if key.revoked_at else "active"
        made = f"{key.created_at:%Y-%m-%d}"
        typer.echo(f"{key.key_id}\t{key.prefix}...\t{key.tenant}\t{key.role}\t{made}\t{state}\t{key.name}")


@keys.command("revoke")
def revoke(
    key_id: Annotated[int, typer.Argument(help="The key's number in `keys list`.")],
    data: Data = None,
    database_url: DatabaseUrl = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key. Running servers refuse the key within seconds."""
    key = _with_keys(data, database_url, config, lambda service: service.revoke(key_id))
    if key is None:
        typer.echo(f"tinsmith keys: there is no key {key_id}", err=True)
        raise typer.Exit(1)
    if as_json:
        print_json({"key_id": key_id, "revoked": True})
    elif key.revoked_at is not None:
        typer.echo(f"key {key_id} was already revoked on {key.revoked_at:%Y-%m-%d}")
    else:
        typer.echo(f"revoked key {key_id}")


def _check_tenant(tenant: str) -> None:
    """Refuse an invalid tenant name. Call this before a store is created for the tenant."""
    try:
        check_tenant_name(tenant)
    except TinsmithError as error:
        typer.echo(f"tinsmith keys: {error}", err=True)
        raise typer.Exit(2) from error


def _with_keys(
    data: Path | None,
    database_url: str | None,
    config: Path | None,
    use: Callable[[Keys], Awaitable[T]],
    *,
    may_make_store: bool = False,
) -> T:
    async def use_keys(store: Store, settings: Settings) -> T:
        static_key = settings.api_key.get_secret_value() if settings.api_key else None
        return await use(Keys(store, static_key))

    return with_store("tinsmith keys", data, database_url, config, use_keys, may_make_store=may_make_store)


def with_store(
    command: str,
    data: Path | None,
    database_url: str | None,
    config: Path | None,
    use: Callable[[Store, Settings], Awaitable[T]],
    *,
    may_make_store: bool = False,
) -> T:
    """Return the result of `use` with the server's store. On an error, print one sentence and exit."""
    try:
        settings = load_settings({"data": data, "database_url": database_url}, config)
        if missing := _missing_file(settings):
            if not may_make_store or not _names_store(settings):
                raise StartupError(_nothing_there(settings, missing))
            make_data_directory(missing.parent)
            typer.echo(f"no server has used {missing.parent} yet: creating the store {missing}", err=True)
        return asyncio.run(_on_store(settings, use))
    except TinsmithError as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(2) from error


def _missing_file(settings: Settings) -> Path | None:
    """Return the path of the SQLite file if the file does not exist. Returns None for a database server."""
    url = parse_store_url(settings.store_url)
    file = Path(url.database or "")
    return file if url.drivername == "sqlite" and not file.exists() else None


def _names_store(settings: Settings) -> bool:
    """Return whether a flag, the environment or a file names the store.

    A store without an explicit name is in the working directory, and a server in another directory does not read this
    store.
    """
    return bool({"data", "database_url"} & settings.model_fields_set)


def _nothing_there(settings: Settings, missing: Path) -> str:
    if not _names_store(settings):
        return f"there is no store {missing}; set --data to the data directory of the key's server"
    if settings.database_url is None:
        return f"{settings.data} contains no server's data; set --data or --config"
    return f"there is no store {missing}; set the server's --database-url, --data or --config"


async def _on_store(settings: Settings, use: Callable[[Store, Settings], Awaitable[T]]) -> T:
    store = await open_store(settings.store_url)
    act_as(COMMAND_LINE)
    try:
        return await use(store, settings)
    finally:
        await store.close()


def _fields(key: ApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "prefix": key.prefix,
        "tenant": key.tenant,
        "name": key.name,
        "role": key.role,
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def print_json(value: object) -> None:
    """Print the value for scripts."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
