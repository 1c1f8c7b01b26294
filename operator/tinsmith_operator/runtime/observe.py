"""The observed state of sessions and pools. All objects are read from the cache, without a request."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, islice

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    CONVERSION_APPLICATION,
    IMAGE_PULL_APPLICATION,
    MEMBER_APPLICATION,
    TEMPLATE_LABEL,
    certificate_secret_name,
    conversion_name,
    image_pull_name,
    pod_name,
)
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.sampler_pool import SamplerPool
from tinsmith_operator.api.session_template import SessionTemplate, parse_template
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.ca.certificates import parse_facts
from tinsmith_operator.common.claim_uses import earlier_reader, journal_holder, journal_of_another
from tinsmith_operator.common.observed import CertificateFacts, Observed, ObservedPool, ReadJournal
from tinsmith_operator.common.ownership import controller_of, has_foreign_owner
from tinsmith_operator.errors import CertificateUnreadable
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import (
    BUDGETS,
    CLAIMS,
    DEPLOYMENTS,
    JOBS,
    JOURNAL_CLAIM,
    MODEL_CLAIM,
    OWNERS,
    PODS,
    POLICIES,
    RAY_CLUSTERS,
    SECRETS,
    SERVICES,
    SESSIONS,
    TEMPLATES,
    WORKLOADS,
    Group,
    Key,
    Ref,
    Resource,
    labels_of,
)
from tinsmith_operator.logs import get_logger
from tinsmith_operator.template.situation import ObservedTemplate

log = get_logger(__name__)

RAY_LABEL = "ray.io/cluster"
"""The label with the name of the RayCluster. KubeRay sets this label on each pod that KubeRay creates."""


class _Reading:
    """A record of the objects that one owner reads. If a recorded object changes later, the owner is enqueued."""

    def __init__(self, cache: Cache, reader: Key, owner: Owner) -> None:
        self._cache = cache
        self._reader = reader
        self._owner = owner
        cache.forget_reader(reader)

    def one(self, resource: Resource, name: str) -> Manifest | None:
        return self._cache.read(Ref(resource.kind, self._owner.namespace, name), self._reader)

    def certificate(self, workload_name: str) -> CertificateFacts | None:
        return certificate_at(
            self._cache, Ref(SECRETS.kind, self._owner.namespace, certificate_secret_name(workload_name))
        )

    def labelled(self, resource: Resource) -> list[Manifest]:
        """Return all objects with the owner's label."""
        owner = self._owner
        return self._cache.read_group(Group(resource.kind, owner.namespace, owner.LABEL, owner.name), self._reader)

    def with_journal_on(self, claim: str, resource: Resource) -> list[Manifest]:
        """Return the sessions or pods that use the claim for a journal."""
        return self._cache.read_group(Group(resource.kind, self._owner.namespace, JOURNAL_CLAIM, claim), self._reader)

    def with_model_on(self, claim: str) -> list[Manifest]:
        """Return the sessions and pools that use this claim for a model."""
        groups = (Group(kind.kind, self._owner.namespace, MODEL_CLAIM, claim) for kind in OWNERS)
        return [each for group in groups for each in self._cache.read_group(group, self._reader)]

    def journal_for_a_model(self) -> ReadJournal | None:
        """Return the first of the owner's claims for a model that holds the journal of another session."""
        for field, claim in self._owner.spec.model_claims.items():
            users = self.with_journal_on(claim, SESSIONS)
            holder = journal_of_another(self._owner, self.one(CLAIMS, claim), users)
            if holder is not None:
                return ReadJournal(field, claim, holder)
        return None


def observe_session(cache: Cache, reader: Key, session: TrainingSession, authority_fingerprint: str | None) -> Observed:
    """Return the objects that have the names of the session's children, including foreign objects."""
    reading, name = _Reading(cache, reader, session), session.workload_name
    secret = reading.one(SECRETS, certificate_secret_name(name))
    claim = reading.one(CLAIMS, session.claim_name)
    labelled = reading.labelled(PODS)
    group = _pods_of_a_group(session, labelled)
    if session.status.template is not None:
        # The template says whether the session is warm.
        reading.one(TEMPLATES, session.status.template.name)
    return Observed(
        session=session,
        authority_fingerprint=authority_fingerprint,
        workload=reading.one(RAY_CLUSTERS if session.spec.is_group else WORKLOADS, name),
        service=reading.one(SERVICES, name),
        policy=reading.one(POLICIES, name),
        claim=claim,
        claim_holder=journal_holder(
            session,
            claim,
            reading.with_journal_on(session.claim_name, SESSIONS),
            reading.with_journal_on(session.claim_name, PODS),
        ),
        claim_reader=earlier_reader(session, claim, reading.with_model_on(session.claim_name)),
        read_journal=reading.journal_for_a_model(),
        certificate_secret=secret,
        conversion=reading.one(JOBS, conversion_name(session.name)),
        converters=_pods_of_a_job(labelled, conversion_name(session.name), CONVERSION_APPLICATION),
        image_pull=reading.one(JOBS, image_pull_name(session.name)),
        pullers=_pods_of_a_job(labelled, image_pull_name(session.name), IMAGE_PULL_APPLICATION),
        pod=_worker_pod(session, reading.one(PODS, pod_name(session.name)), group),
        members=tuple(pod for pod in group if _is_member(pod)),
        certificate=reading.certificate(name),
    )


def observe_pool(cache: Cache, reader: Key, pool: SamplerPool, authority_fingerprint: str | None) -> ObservedPool:
    """Return the objects that have the names of the pool's children, and the pods of the Deployment."""
    reading, name = _Reading(cache, reader, pool), pool.workload_name
    secret = reading.one(SECRETS, certificate_secret_name(name))
    return ObservedPool(
        pool=pool,
        read_journal=reading.journal_for_a_model(),
        authority_fingerprint=authority_fingerprint,
        workload=reading.one(DEPLOYMENTS, name),
        service=reading.one(SERVICES, name),
        policy=reading.one(POLICIES, name),
        budget=reading.one(BUDGETS, name),
        certificate_secret=secret,
        pods=tuple(pod for pod in reading.labelled(PODS) if _is_made_for(name, pod)),
        certificate=reading.certificate(name),
    )


def observe_template(
    cache: Cache, reader: Key, template: SessionTemplate, refusals: Mapping[str, str]
) -> ObservedTemplate:
    """Return the sessions that were created from the template, and the names that are free for more."""
    cache.forget_reader(reader)
    sessions = cache.read_group(Group(SESSIONS.kind, template.namespace, TEMPLATE_LABEL, template.name), reader)
    refs = ((number, Ref(SESSIONS.kind, template.namespace, f"{template.name}-{number}")) for number in count(1))
    free = (number for number, ref in refs if cache.peek(ref) is None)
    return ObservedTemplate(
        template=template,
        sessions=tuple(sessions),
        free_numbers=tuple(islice(free, template.spec.max_sessions)),
        refusals=refusals,
    )


def template_of(cache: Cache, reader: Key, name: str) -> SessionTemplate | None:
    """Return the template with this name in the session's namespace. The session is enqueued when it changes."""
    body = cache.read(Ref(TEMPLATES.kind, reader.namespace, name), reader)
    return parse_template(body) if body is not None else None


def certificate_at(cache: Cache, secret: Ref) -> CertificateFacts | None:
    """Return the facts about a certificate.

    Each version of the Secret is parsed once, not at each scrape of the metrics.
    """
    return cache.derive(secret, _facts_of)


def _facts_of(secret: Manifest) -> CertificateFacts | None:
    """Return the facts, or None if the certificate cannot be read. An unreadable certificate is logged once."""
    try:
        return parse_facts(secret)
    except CertificateUnreadable as error:
        log.warning("certificate not read", error=str(error))
        return None


def _pods_of_a_group(session: TrainingSession, labelled: list[Manifest]) -> list[Manifest]:
    """Return the pods of a RayCluster with the session's name. The RayCluster itself may be gone."""
    return [pod for pod in labelled if RAY_LABEL in labels_of(pod) and not has_foreign_owner(session, pod)]


def _worker_pod(session: TrainingSession, numbered: Manifest | None, group: list[Manifest]) -> Manifest | None:
    """Return the worker's pod, even if the pod belongs to a workload of the session's earlier kind.

    A pod of an earlier workload may still write to the volume.

    `numbered` is the pod with the name of a StatefulSet's first pod.
    """
    heads = [pod for pod in group if not _is_member(pod)]
    if not session.spec.is_group:
        return numbered or next(iter(heads), None)
    earlier = numbered if numbered is not None and not has_foreign_owner(session, numbered) else None
    return next(iter(heads), earlier)


def _is_member(pod: Manifest) -> bool:
    return labels_of(pod).get("app.kubernetes.io/name") == MEMBER_APPLICATION


def _pods_of_a_job(labelled: list[Manifest], job_name: str, application: str) -> tuple[Manifest, ...]:
    """Return the pods of the session's Job with this name.

    Pods of an earlier Job that was just deleted are included.
    """
    made_for = [pod for pod in labelled if labels_of(pod).get("app.kubernetes.io/name") == application]
    return tuple(pod for pod in made_for if (controller_of(pod) or {}).get("name") == job_name)


def _is_made_for(deployment_name: str, pod: Manifest) -> bool:
    """Return whether the pod belongs to the Deployment, according to the name of the pod's ReplicaSet.

    ReplicaSets are not watched.
    """
    controller = controller_of(pod)
    return controller is not None and controller["name"].rpartition("-")[0] == deployment_name
