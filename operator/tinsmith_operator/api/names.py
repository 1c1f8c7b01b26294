"""Names that are written into the cluster, and that others may therefore rely on."""

from __future__ import annotations

GROUP = "tinsmith.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
SESSION_KIND = "TrainingSession"
SESSION_PLURAL = "trainingsessions"
POOL_KIND = "SamplerPool"
POOL_PLURAL = "samplerpools"

MANAGER = "tinsmith-operator"
"""The field manager, and the value of the managed-by label."""

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
SESSION_LABEL = f"{GROUP}/session"
POOL_LABEL = f"{GROUP}/pool"

CLAIM_FINALIZER = f"{GROUP}/claim"
"""On a session whose claim is to be deleted with it, and on no other."""

IMAGE_ANNOTATION = f"{GROUP}/image"
"""On the claim: the image, as somebody asked for it, that may write to this volume."""

IMAGE_DIGEST_ANNOTATION = f"{GROUP}/image-digest"
"""On the claim: what that image was when it first ran, as repository@digest."""

PREVIOUS_IMAGE_ANNOTATION = f"{GROUP}/previous-image"
PREVIOUS_IMAGE_DIGEST_ANNOTATION = f"{GROUP}/previous-image-digest"
"""On the claim: the image before, for the case that the journal needs it once more."""

IMAGE_CHOICE_ANNOTATION = f"{GROUP}/image-chosen-by"
"""On the claim: `session` where the session's spec names the image; else the installation's default was taken."""

IMAGE_REFUSED_ANNOTATION = f"{GROUP}/image-refused"
"""On the claim: an image that refused this volume because another one has not replayed its journal."""

IMAGE_REFUSALS_ANNOTATION = f"{GROUP}/image-refusals"
"""On the claim: how often it did."""

CONFIGURATION_ANNOTATION = f"{GROUP}/configuration"
"""On every child: a hash of what the operator wants of it, so that a field taken away is noticed."""

INPUTS_ANNOTATION = f"{GROUP}/inputs"
"""On the pod: a hash of what its user said of it. Another hash means that the worker must be restarted."""

SPEC_ANNOTATION = f"{GROUP}/asked"
"""On the worker's pod: a hash of what its own user said of it. With another one in `inputs` alone, the installation's
settings have changed."""

RESTART_REQUEST_ANNOTATION = f"{GROUP}/restart-requested-at"
"""By users, on a session or pool: a time. Once for each, what runs is started anew, cleanly."""

SNAPSHOT_REQUEST_ANNOTATION = f"{GROUP}/snapshot-requested-at"
"""By users, on a session: a time. Once for each, the worker writes a snapshot."""

POD_RETRY_ANNOTATION = f"{GROUP}/pods-retried-at"
"""On a workload: when its controller was last asked to create refused pods again."""

CONVERSION_ANNOTATION = f"{GROUP}/conversion"
"""On the Job that converts a model: a hash of what decides its result. Another hash means another conversion."""

IMAGE_PULL_ANNOTATION = f"{GROUP}/image-pull"
"""On the Job that pulls an image: a hash of which image it pulls, and on which node."""

WORKER_APPLICATION = "tinsmith-worker"
"""As `app.kubernetes.io/name` of a session's pod that holds its worker."""

SAMPLER_APPLICATION = "tinsmith-sampler"
"""As `app.kubernetes.io/name` of a pool's pods."""

MEMBER_APPLICATION = "tinsmith-worker-member"
"""As `app.kubernetes.io/name` of the pods of a session of several, but for the one with its worker."""

CONVERSION_APPLICATION = "tinsmith-conversion"
"""As `app.kubernetes.io/name` of the pods of the Job that converts a session's model."""

IMAGE_PULL_APPLICATION = "tinsmith-image-pull"
"""The label `app.kubernetes.io/name` of the pods that pull an image onto a worker's node."""

JOURNAL_VOLUME = "journal"
"""Of the worker's pod: by it a pod is known to write to a claim, whoever may still mount it."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's, on whatever a queue of its decides about: from then on whether that runs is the queue's to say."""

RPC_PORT = 7443
HEALTH_PORT = 7080

WORKER_CONTAINER = "worker"


def claim_name(session_name: str) -> str:
    return f"{session_name}-journal"


def certificate_secret_name(workload_name: str) -> str:
    return f"{workload_name}-tls"


def conversion_name(session_name: str) -> str:
    """Return the Job's name, which is short enough for the longest name of a session."""
    return f"{session_name}-conversion"


def image_pull_name(session_name: str) -> str:
    """Return the Job's name, which is short enough for the longest name of a session."""
    return f"{session_name}-image-pull"


def pod_name(session_name: str) -> str:
    return f"{session_name}-0"


def endpoint(session_name: str, namespace: str) -> str:
    return f"{session_name}.{namespace}.svc:{RPC_PORT}"


def worker_dns_name(worker_id: str) -> str:
    """The name in a worker's certificate; a client that expects this worker checks it."""
    return f"{worker_id}.worker.tinsmith.internal"


SAMPLER_DNS_NAME = "sampler.tinsmith.internal"
"""In the certificate of a pool's samplers, beside their own: by it workers give them saves, as clients."""
