"""`tinsmith tenants`: commands that show tenants, and set their limits, without a running server."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from tinsmith_server.cli.key_commands import AsJson, Config, Data, DatabaseUrl, print_json, with_store
from tinsmith_server.services.accounts.limits import Limits, Tenant, as_dict
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import TenantLimits
from tinsmith_server.store.store import Store

tenants = typer.Typer(help="Show tenants, and set their limits.", no_args_is_help=True)

COMMAND = "tinsmith tenants"


@tenants.command("list")
def list_(data: Data = None, database_url: DatabaseUrl = None, config: Config = None, as_json: AsJson = False) -> None:
    """Show all tenants with their use and their limits."""

    async def read(store: Store, settings: Settings) -> list[dict[str, Any]]:
        return [_fields(one) for one in await Limits(store, settings).tenants()]

    found = with_store(COMMAND, data, database_url, config, read)
    if as_json:
        print_json(found)
        return
    typer.echo("TENANT\tKEYS\tMODELS\tCHECKPOINT BYTES\tLIMITS")
    for one in found:
        limits = ", ".join(f"{name}={value}" for name, value in one["limits"].items()) or "none of its own"
        typer.echo(f"{one['tenant']}\t{one['keys']}\t{one['adapters']}\t{one['checkpoint_bytes']}\t{limits}")


@tenants.command("limit")
def limit(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.")],
    *,
    adapters: Annotated[int | None, typer.Option(min=0, help="Models, including waiting ones.")] = None,
    queued_operations: Annotated[int | None, typer.Option(min=1, help="Queued operations.")] = None,
    requests_per_second: Annotated[float | None, typer.Option(min=0.02, help="Requests of all its keys.")] = None,
    checkpoint_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes of its named checkpoints.")] = None,
    checkpoints_kept: Annotated[
        int | None, typer.Option(min=1, help="Checkpoints of each kind that a run keeps; older ones are deleted.")
    ] = None,
    share_weight: Annotated[
        float | None, typer.Option(min=0.1, max=10.0, help="Its share of a worker, if others have 1.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove its other limits.")] = False,
    data: Data = None,
    database_url: DatabaseUrl = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Set limits of a tenant in place of the server's settings. Running servers apply them within seconds."""
    given: dict[str, Any] = {
        "adapters": adapters,
        "queued_operations": queued_operations,
        "requests_per_second": requests_per_second,
        "checkpoint_bytes": checkpoint_bytes,
        "checkpoints_kept": checkpoints_kept,
        "share_weight": share_weight,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes and not clear:
        typer.echo(f"{COMMAND}: no limit is given; name one, or remove all with --clear", err=True)
        raise typer.Exit(2)

    async def change(store: Store, settings: Settings) -> TenantLimits:
        limits = Limits(store, settings)
        before = TenantLimits(tenant) if clear else await limits.of(tenant)
        await limits.set(after := replace(before, **changes))
        return after

    limits = as_dict(with_store(COMMAND, data, database_url, config, change))
    if as_json:
        print_json({"tenant": tenant, "limits": limits})
    else:
        shown = ", ".join(f"{name}={value}" for name, value in limits.items())
        typer.echo(f"tenant {tenant}: {shown or 'no limits of its own'}")


def _fields(one: Tenant) -> dict[str, Any]:
    return {
        "tenant": one.limits.tenant,
        "keys": one.totals.keys,
        "adapters": one.totals.adapters,
        "checkpoint_bytes": one.totals.checkpoint_bytes,
        "limits": as_dict(one.limits),
    }
