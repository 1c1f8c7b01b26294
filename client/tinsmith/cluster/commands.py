"""The commands of `kubectl tinsmith`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tinsmith.cluster import requests
from tinsmith.cluster.bundle import Bundle
from tinsmith.cluster.families import Family, Kind, choose, list_readable, parse_target, read_families, read_family
from tinsmith.cluster.health import judge
from tinsmith.cluster.kubectl import Access, Kubectl, NotFound, PluginError
from tinsmith.cluster.manifests import name_of
from tinsmith.cluster.report import collect
from tinsmith.cluster.requests import Request, wait_for
from tinsmith.cluster.status_tree import as_json, status_tree
from tinsmith.cluster.why import NamespaceFacts, explain
from tinsmith.console import Branch, draw, make_console, print_error

MOST_STREAMS = 64
"""The limit on concurrent log streams. The default of kubectl is five."""

cluster = typer.Typer(
    help="Inspect and manage TrainingSessions and SamplerPools in a cluster with kubectl.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback with local variables would show secrets.
    pretty_exceptions_show_locals=False,
)

Named = Annotated[str, typer.Argument(metavar="NAME", help="NAME, or session/NAME or pool/NAME if both exist.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; default: the current one.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace; default: the context's.")]
Kubeconfig = Annotated[str | None, typer.Option(help="Kubeconfig file; default: the one that kubectl finds.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the change is complete, or return at once.")]
Timeout = Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long --wait waits.")]


class Output(StrEnum):
    """The formats of the output."""

    TREE = "tree"
    JSON = "json"


@cluster.command()
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="NAME, session/NAME or pool/NAME; default: all of them.")
    ] = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="All namespaces.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="A tree for people, or JSON for scripts.")] = (
        Output.TREE
    ),
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show sessions and pools with their conditions, pods and volumes.

    Sessions and pools that need attention come first.
    """
    with errors_as_sentences():
        seen = read_families(Kubectl(Access(context, namespace, kubeconfig), all_namespaces=all_namespaces))
        families = seen.families if name is None else (choose(seen.families, parse_target(name)),)
        if output is Output.JSON:
            print(json.dumps({"items": as_json(families), "notShown": seen.unread}))
            return
        show(status_tree(families, now(), with_namespaces=all_namespaces))
        for sentence in seen.unread:
            print_error(sentence)
        if not families:
            print_error("There is no TrainingSession or SamplerPool in this namespace; use -A for all namespaces.")


@cluster.command()
def why(name: Named, context: Context = None, namespace: Namespace = None, kubeconfig: Kubeconfig = None) -> None:
    """Show why a session or pool is not ready: the reason, what to do, and the evidence."""
    with errors_as_sentences():
        kubectl = Kubectl(Access(context, namespace, kubeconfig))
        family, unread = read_family(kubectl, parse_target(name))
        show(explain(family, _namespace_facts(kubectl, unread), now()))


@cluster.command()
def logs(
    name: Named,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until it ends.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Show the log from before the last restart.")
    ] = False,
    since: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Only lines that are newer than this, for example 10m.")
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the log of a session's worker, or of all replicas of a pool. Each line begins with the name of the pod."""
    with errors_as_sentences():
        kubectl = Kubectl(Access(context, namespace, kubeconfig))
        family, _ = read_family(kubectl, parse_target(name))
        words = log_arguments(family, follow=follow, previous=previous, since=since)
        raise typer.Exit(1 if kubectl.run_attached(*words) else 0)


@cluster.command()
def suspend(
    name: Named,
    wait: Wait = True,
    timeout: Timeout = 600,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop a session's worker after a snapshot; its volume keeps all data."""
    _send(Access(context, namespace, kubeconfig), name, requests.suspend, timeout if wait else None)


@cluster.command()
def resume(
    name: Named,
    wait: Wait = True,
    timeout: Timeout = 1800,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Start the worker of a suspended session again. The worker continues from its last snapshot."""
    _send(Access(context, namespace, kubeconfig), name, requests.resume, timeout if wait else None)


@cluster.command()
def wake(
    name: Named,
    wait: Wait = True,
    timeout: Timeout = 1800,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Start a session or pool that was suspended because no client used it. A client's request does the same."""
    at, access = now(), Access(context, namespace, kubeconfig)
    _send(access, name, lambda family: requests.wake(family, at), timeout if wait else None)


@cluster.command()
def snapshot(
    name: Named,
    wait: Wait = True,
    timeout: Timeout = 600,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Make a session's worker write its adapters to its volume now."""
    at, access = now(), Access(context, namespace, kubeconfig)
    _send(access, name, lambda family: requests.snapshot(family, at), timeout if wait else None)


@cluster.command()
def restart(
    name: Named,
    wait: Wait = True,
    timeout: Timeout = 1800,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Restart a session after a snapshot, or a pool replica by replica, with the installation's current image."""
    at, access = now(), Access(context, namespace, kubeconfig)
    _send(access, name, lambda family: requests.restart(family, at), timeout if wait else None)


@cluster.command()
def report(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Report on this session or pool alone; default: all of them.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.tar.gz", help="Archive to write; default: a name with the time."),
    ] = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="All namespaces.")] = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Collect resources, events, logs and versions for a support request. Secrets are removed."""
    began = now()
    file = output or Path(f"tinsmith-report-{began:%Y%m%d-%H%M%S}.tar.gz")
    with errors_as_sentences():
        kubectl = Kubectl(Access(context, namespace, kubeconfig), all_namespaces=all_namespaces)
        bundle = Bundle(began)
        collect(kubectl, parse_target(name) if name is not None else None, bundle, print_error)
        bundle.write(file)
        print(file)
        print_error(
            "The index lists what the archive contains and what is missing. Read the archive before you send it."
        )


def log_arguments(family: Family, *, follow: bool, previous: bool, since: str | None) -> list[str]:
    """Return the arguments of `kubectl logs`, for the namespace of the family.

    Raises NotFound for a family without a pod.
    """
    if not family.pods:
        verdict = judge(family)
        raise NotFound(f"{family.title} has no pod now. It is {verdict.headline}: {verdict.message}")
    options = {"--follow": follow, "--previous": previous}
    words = [option for option, enabled in options.items() if enabled]
    words += [f"--since={since}"] if since is not None else []
    return ["logs", *_pod_selector(family), *words]


def _pod_selector(family: Family) -> list[str]:
    """Return the arguments that select pods. With a label selector, kubectl shows only ten lines by default."""
    if family.kind is Kind.SESSION:
        return [name_of(family.pods[0])]
    chosen = f"--selector={family.kind.label}={family.name}"
    return [chosen, "--prefix", "--tail=-1", f"--max-log-requests={MOST_STREAMS}"]


def _send(access: Access, name: str, make: Callable[[Family], Request], timeout_seconds: float | None) -> None:
    """Change the resource. If timeout_seconds is not None, wait until the change is complete."""
    with errors_as_sentences():
        kubectl = Kubectl(access)
        family, _ = read_family(kubectl, parse_target(name))
        request = make(family)
        kubectl.merge_patch(family.kind.resource, family.name, request.patch)
        print_error(f"{request.announcement}.")
        if timeout_seconds is not None:
            print(_wait_for(kubectl, f"{family.kind.word}/{family.name}", request, timeout_seconds))


def _wait_for(kubectl: Kubectl, exact: str, request: Request, timeout_seconds: float) -> str:
    return wait_for(
        lambda: read_family(kubectl, parse_target(exact))[0],
        request.outcome,
        name=exact,
        timeout_seconds=timeout_seconds,
        progress=print_error,
    )


def _namespace_facts(kubectl: Kubectl, unread: tuple[str, ...]) -> NamespaceFacts:
    found, missing = list_readable(kubectl, ("events", "resourcequotas"), None)
    return NamespaceFacts(
        events=tuple(item for item in found if item["kind"] == "Event"),
        quotas=tuple(item for item in found if item["kind"] == "ResourceQuota"),
        unread=(*unread, *missing),
    )


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error as one line on standard error. Exit with status 1 for failures, and with 2 for misuse."""
    try:
        yield
    except PluginError as error:
        print_error(str(error))
        raise typer.Exit(error.exit_status) from error


def show(branches: Iterable[Branch]) -> None:
    """Print the tree. Colours are used only on a terminal.

    Lines are never wrapped, so that users can search in the output.
    """
    console = make_console()
    for line in draw(branches):
        console.print(line)


def now() -> datetime:
    return datetime.now(UTC)


def main() -> NoReturn:
    """Run `kubectl tinsmith`; kubectl starts this program under the name `kubectl-tinsmith`."""
    cluster(prog_name="kubectl tinsmith")
    raise AssertionError("a command ends its program")
