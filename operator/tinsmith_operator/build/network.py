"""The Service, the NetworkPolicy and the Secret with the certificate for the pods of a workload."""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import RPC_PORT, SAMPLER_APPLICATION, WORKER_APPLICATION, certificate_secret_name
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.sampler_pool import SamplerPool
from tinsmith_operator.api.serving_spec import ModelSource, SourceType
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.metadata import child_metadata, sealed, selector_labels
from tinsmith_operator.installation import HTTP_PORT, HTTPS_PORT, Installation

DNS: Manifest = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}

CREDENTIAL_SERVERS = ("169.254.169.254/32", "169.254.170.23/32")
"""The addresses of every node's metadata service, and of the agent of EKS Pod Identity."""

CREDENTIALS: Manifest = {
    "to": [{"ipBlock": {"cidr": cidr}} for cidr in CREDENTIAL_SERVERS],
    "ports": [{"port": HTTP_PORT, "protocol": "TCP"}],
}


def build_service(owner: Owner) -> Manifest:
    """Return the headless Service. The Service also selects pods that are not ready.

    The API server must reach workers that still replay their journal, and samplers that drain.
    """
    return sealed(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": child_metadata(owner, owner.workload_name),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": selector_labels(owner),
                "ports": [{"name": "rpc", "port": RPC_PORT, "targetPort": "rpc", "protocol": "TCP"}],
            },
        }
    )


def build_pool_policy(pool: SamplerPool, installation: Installation) -> Manifest:
    """Return the NetworkPolicy of a pool.

    The policy allows samplers to fetch saves from the workers of sessions in the namespace.

    The API server sends the addresses of workers to samplers, so samplers need no DNS for connections to workers.
    """
    policy = build_policy(pool, installation)
    saves = {"to": [_pods_of(WORKER_APPLICATION)], "ports": [_tcp(RPC_PORT)]}
    return _selecting(policy, pool, {"egress": [*policy["spec"]["egress"], saves]})


def build_policy(owner: Owner, installation: Installation) -> Manifest:
    return sealed(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": child_metadata(owner, owner.workload_name),
            "spec": {
                "podSelector": {"matchLabels": selector_labels(owner)},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [_rpc_from_the_release(installation)],
                "egress": egress(owner.spec.model.source, installation),
            },
        }
    )


def build_session_policy(session: TrainingSession, installation: Installation) -> Manifest:
    """Return the NetworkPolicy of a session.

    Pods of one session may connect to all ports of pods of the same session, because Ray and NCCL choose ports freely.
    No other pod may connect to the ports of Ray, because any client of Ray can run programs in the pod. Samplers in the
    namespace fetch saves through the port of the worker.
    """
    policy = build_policy(session, installation)
    samplers = {"from": [_pods_of(SAMPLER_APPLICATION)], "ports": [_tcp(RPC_PORT)]}
    policy = _selecting(policy, session, {"ingress": [*policy["spec"]["ingress"], samplers]})
    pods = {"podSelector": {"matchLabels": {session.LABEL: session.name}}}
    if not session.spec.is_group:
        # The conversion Job downloads the model in the same way as the worker.
        return _selecting(policy, session, pods) if session.spec.is_converted_once else policy
    all_ports = [{"protocol": "TCP"}]
    spec = policy["spec"]
    outside = [rule for rule in spec["egress"] if rule != DNS]
    between = {
        "ingress": [*spec["ingress"], {"from": [pods], "ports": all_ports}],
        "egress": [DNS, {"to": [pods], "ports": all_ports}, *outside],
    }
    return _selecting(policy, session, {**pods, **between})


def build_certificate_secret(owner: Owner) -> Manifest:
    """Return the Secret without its data. The issuer of the certificate adds the data."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(owner, certificate_secret_name(owner.workload_name)),
        "type": "kubernetes.io/tls",
    }


def _selecting(policy: Manifest, owner: Owner, changes: Manifest) -> Manifest:
    metadata = child_metadata(owner, owner.workload_name)
    return sealed({**policy, "metadata": metadata, "spec": {**policy["spec"], **changes}})


def _rpc_from_the_release(installation: Installation) -> Manifest:
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": installation.namespace}}
    return {
        "from": [
            {"namespaceSelector": namespace, "podSelector": {"matchLabels": dict(labels)}}
            for labels in installation.client_labels
        ],
        "ports": [_tcp(RPC_PORT)],
    }


def _pods_of(application: str) -> Manifest:
    """Return a selector for the pods of this application in the policy's namespace."""
    return {"podSelector": {"matchLabels": {"app.kubernetes.io/name": application}}}


def _tcp(port: int) -> Manifest:
    return {"port": port, "protocol": "TCP"}


def egress(source: ModelSource, installation: Installation) -> list[Manifest]:
    """Return the rules for outgoing connections to DNS, the hub, the object store and the collector of traces.

    If the pod needs no outgoing connection, return no rules.
    """
    ports = {HTTPS_PORT} if source.type is SourceType.HUB else set()
    if (port := installation.checkpoint_port) is not None:
        ports.add(port)
    if (port := installation.tracing_port) is not None:
        ports.add(port)
    if installation.checkpoint_identity_is_the_pods:
        # Pods exchange their ServiceAccount token for credentials at this port (STS).
        ports.add(HTTPS_PORT)
    if not ports:
        return []
    outside = {"ports": [_tcp(port) for port in sorted(ports)]}
    return [DNS, outside, *([CREDENTIALS] if installation.checkpoint_identity_is_the_pods else [])]
