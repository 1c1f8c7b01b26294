"""The names that the operator writes into the cluster. Other programs may rely on them."""

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
"""On a session whose claim is to be deleted with it."""

IMAGE_ANNOTATION = f"{GROUP}/image"
"""On the claim: the image that may write to this volume, as it was requested."""

IMAGE_DIGEST_ANNOTATION = f"{GROUP}/image-digest"
"""On the claim: the digest of that image when it first ran, as repository@digest."""

PREVIOUS_IMAGE_ANNOTATION = f"{GROUP}/previous-image"
PREVIOUS_IMAGE_DIGEST_ANNOTATION = f"{GROUP}/previous-image-digest"
"""On the claim: the previous image, in case the journal needs it again."""

IMAGE_CHOICE_ANNOTATION = f"{GROUP}/image-chosen-by"
"""On the claim: `session` if the session's spec names the image; otherwise it was the installation's default."""

IMAGE_REFUSED_ANNOTATION = f"{GROUP}/image-refused"
"""On the claim: an image that refused this volume, because an earlier image has not replayed its journal."""

IMAGE_REFUSALS_ANNOTATION = f"{GROUP}/image-refusals"
"""On the claim: the number of these refusals."""

CONFIGURATION_ANNOTATION = f"{GROUP}/configuration"
"""On each child: a hash of the desired object, so that a removed field is noticed."""

INPUTS_ANNOTATION = f"{GROUP}/inputs"
"""On the pod: a hash of its inputs. With another hash, the worker must be restarted."""

SPEC_ANNOTATION = f"{GROUP}/asked"
"""On the worker's pod: a hash of the inputs of the session's own spec. If only `inputs` has changed, the installation's
settings have."""

RESTART_REQUEST_ANNOTATION = f"{GROUP}/restart-requested-at"
"""Set by users on a session or pool: a time. The pods restart cleanly once for each new time."""

SNAPSHOT_REQUEST_ANNOTATION = f"{GROUP}/snapshot-requested-at"
"""Set by users on a session: a time. The worker writes a snapshot once for each new time."""

POD_RETRY_ANNOTATION = f"{GROUP}/pods-retried-at"
"""On a workload: when the operator last asked its controller to create refused pods again."""

CONVERSION_ANNOTATION = f"{GROUP}/conversion"
"""On the Job that converts a model: a hash of what decides its result."""

IMAGE_PULL_ANNOTATION = f"{GROUP}/image-pull"
"""On the Job that pulls an image: a hash of the image and the node."""

WORKER_APPLICATION = "tinsmith-worker"
"""The label `app.kubernetes.io/name` of the worker's pod."""

SAMPLER_APPLICATION = "tinsmith-sampler"
"""The label `app.kubernetes.io/name` of a pool's pods."""

MEMBER_APPLICATION = "tinsmith-worker-member"
"""The label `app.kubernetes.io/name` of the other pods of a session of several nodes."""

CONVERSION_APPLICATION = "tinsmith-conversion"
"""The label `app.kubernetes.io/name` of the pods of the Job that converts a session's model."""

IMAGE_PULL_APPLICATION = "tinsmith-image-pull"
"""The label `app.kubernetes.io/name` of the pods that pull an image onto a worker's node."""

JOURNAL_VOLUME = "journal"
"""The volume of the worker's pod by which a pod is known to write to a claim."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's label on a workload that belongs to a queue, which then decides when it runs."""

RPC_PORT = 7443
HEALTH_PORT = 7080

WORKER_CONTAINER = "worker"


def claim_name(session_name: str) -> str:
    return f"{session_name}-journal"


def certificate_secret_name(workload_name: str) -> str:
    return f"{workload_name}-tls"


def conversion_name(session_name: str) -> str:
    """Return the Job's name, which fits into Kubernetes' limit even for the longest session name."""
    return f"{session_name}-conversion"


def image_pull_name(session_name: str) -> str:
    """Return the Job's name, which fits into Kubernetes' limit even for the longest session name."""
    return f"{session_name}-image-pull"


def pod_name(session_name: str) -> str:
    return f"{session_name}-0"


def endpoint(session_name: str, namespace: str) -> str:
    return f"{session_name}.{namespace}.svc:{RPC_PORT}"


def worker_dns_name(worker_id: str) -> str:
    """Return the DNS name in a worker's certificate. Clients check it."""
    return f"{worker_id}.worker.tinsmith.internal"


SAMPLER_DNS_NAME = "sampler.tinsmith.internal"
"""A further name in the certificate of a pool's samplers, by which workers admit them as clients that fetch saves."""
