"""How a workload's pods are reached: their Service, their NetworkPolicy, the Secret with their certificate."""

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
"""On each node: its metadata, and the agent of EKS Pod Identity."""

CREDENTIALS: Manifest = {
    "to": [{"ipBlock": {"cidr": cidr}} for cidr in CREDENTIAL_SERVERS],
    "ports": [{"port": HTTP_PORT, "protocol": "TCP"}],
}


def build_service(owner: Owner) -> Manifest:
    """It names pods that are not ready too: the API server speaks to a worker that still replays, and to a sampler that
    takes nothing new any more."""
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
    """A sampler gets saves of the sessions beside it from their workers, whose addresses API servers tell: it needs no
    names for that."""
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
    """Pods of one session speak to each other by whatever ports Ray and NCCL choose. Whoever reaches those can run
    programs there, so nobody else does. Samplers beside them get saves by the worker's port."""
    policy = build_policy(session, installation)
    samplers = {"from": [_pods_of(SAMPLER_APPLICATION)], "ports": [_tcp(RPC_PORT)]}
    policy = _selecting(policy, session, {"ingress": [*policy["spec"]["ingress"], samplers]})
    pods = {"podSelector": {"matchLabels": {session.LABEL: session.name}}}
    if not session.spec.is_group:
        # What converts the model for the worker fetches it from where the worker would.
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
    """But for its data: tls.crt, tls.key and ca.crt come from whoever makes the key."""
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
    """Of any session or pool in this namespace: where none is named, no other is meant."""
    return {"podSelector": {"matchLabels": {"app.kubernetes.io/name": application}}}


def _tcp(port: int) -> Manifest:
    return {"port": port, "protocol": "TCP"}


def egress(source: ModelSource, installation: Installation) -> list[Manifest]:
    """Names and the ports of what a pod fetches or stores outside; nothing at all where it needs neither."""
    ports = {HTTPS_PORT} if source.type is SourceType.HUB else set()
    if (port := installation.checkpoint_port) is not None:
        ports.add(port)
    if installation.checkpoint_identity_is_the_pods:
        # The token of a ServiceAccount is changed for credentials there (STS).
        ports.add(HTTPS_PORT)
    if not ports:
        return []
    outside = {"ports": [_tcp(port) for port in sorted(ports)]}
    return [DNS, outside, *([CREDENTIALS] if installation.checkpoint_identity_is_the_pods else [])]
