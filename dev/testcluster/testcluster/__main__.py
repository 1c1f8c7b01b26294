"""`python -m testcluster up|down|status|kubeconfig|load|build`, with dev/testcluster/ on PYTHONPATH."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from testcluster.cluster import Cluster, configured_cluster, recorded
from testcluster.errors import ClusterError
from testcluster.lifecycle import bring_down, bring_up
from testcluster.places import Places
from testcluster.programs.builds import OF_TESTS, built
from testcluster.project_images import ImagesNotBuilt, build_images
from testcluster.record import dead_processes, every_place, read_record

DEFAULT_NAME = "dev"
_INTERRUPTED = 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m testcluster", description="Test clusters on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start one, unless it is up")
    up.add_argument("--tier", choices=["api", "node"], default="node", help="api: no nodes, no root; node: everything")
    up.add_argument("--nodes", type=int, choices=[1, 2], default=1)
    up.set_defaults(run=_up)
    down = commands.add_parser("down", help="remove one, and whatever a broken start left of it")
    down.set_defaults(run=_down)
    status = commands.add_parser("status", help="say which clusters there are")
    status.set_defaults(run=_status)
    kubeconfig = commands.add_parser("kubeconfig", help="print the path of the kubeconfig file")
    kubeconfig.set_defaults(run=_kubeconfig)
    load = commands.add_parser("load", help="bring OCI or docker archives of images into every node")
    load.add_argument("archives", nargs="*", type=Path, help="default: the project's images, built if need be")
    load.set_defaults(run=_load)
    for command in (up, down, kubeconfig, load):
        command.add_argument("--name", default=DEFAULT_NAME)
    build = commands.add_parser("build", help="build the programs, so that the first start takes seconds")
    build.set_defaults(run=_build)
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ClusterError, ImagesNotBuilt) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _up(options: argparse.Namespace) -> None:
    if options.tier == "node" and (cluster := configured_cluster()) is not None:
        print(f"the cluster of {cluster.kubeconfig} is given, so none is started")
        return
    cluster = recorded(bring_up(options.name, options.tier, options.nodes))
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    print(f"kubectl: {cluster.kubectl_program}")
    if cluster.ingress_address:
        print(f"ingress: http://{cluster.ingress_address}")


def _down(options: argparse.Namespace) -> None:
    existed = bring_down(options.name)
    print(f"cluster {options.name} is down" if existed else f"there is no cluster {options.name}")


def _status(options: argparse.Namespace) -> None:
    places = every_place()
    for place in places:
        print(_state(place))
    if not places:
        print("no test cluster is up")


def _state(places: Places) -> str:
    if (record := read_record(places)) is not None:
        return f"{places.name}: up, tier {record.tier}, {len(record.nodes)} nodes, {record.kubeconfig}"
    if dead := dead_processes(places):
        return f"{places.name}: broken, {', '.join(dead)} ended, logs in {places.logs}"
    return f"{places.name}: not up, logs in {places.logs}"


def _kubeconfig(options: argparse.Namespace) -> None:
    print(_running(options.name).kubeconfig)


def _load(options: argparse.Namespace) -> None:
    cluster = configured_cluster() or _running(options.name)
    for archive in options.archives or build_images().values():
        for image in cluster.load_image(archive):
            print(image.name if image.digest is None else f"{image.name} {image.pinned}")


def _build(_: argparse.Namespace) -> None:
    for program in OF_TESTS:
        built(program)


def _running(name: str) -> Cluster:
    record = read_record(Places(name))
    if record is None:
        raise ClusterError(f"Cluster {name} is not up.")
    return recorded(record)


if __name__ == "__main__":
    sys.exit(main())
