"""The names that the operator writes into the cluster.

Other programs may rely on the names that the operator writes.
"""

from __future__ import annotations

GROUP = "tinsmith.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
SESSION_KIND = "TrainingSession"
SESSION_PLURAL = "trainingsessions"
POOL_KIND = "SamplerPool"
POOL_PLURAL = "samplerpools"
TEMPLATE_KIND = "SessionTemplate"
TEMPLATE_PLURAL = "sessiontemplates"

MANAGER = "tinsmith-operator"
PROGRESS_MANAGER = "tinsmith-operator-progress"
"""The field manager of `status.progress`, which the apply of the other status neither owns nor removes."""
"""The field manager, and the value of the managed-by label."""

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
SESSION_LABEL = f"{GROUP}/session"
POOL_LABEL = f"{GROUP}/pool"

TEMPLATE_LABEL = f"{GROUP}/template"
"""The label on each session that an API server or the operator has created from a template, with the template's name.

A session that a user has created from a template does not have the label. The operator never deletes it.
"""

CLAIM_FINALIZER = f"{GROUP}/claim"
"""The finalizer of a session with `whenDeleted: Delete`: the operator deletes the claim before the session is gone."""

IMAGE_ANNOTATION = f"{GROUP}/image"
"""An annotation on the claim: the image that may write to this volume, under the name that was requested."""

IMAGE_DIGEST_ANNOTATION = f"{GROUP}/image-digest"
"""An annotation on the claim: the digest of the pinned image at the first run, as repository@digest."""

PREVIOUS_IMAGE_ANNOTATION = f"{GROUP}/previous-image"
PREVIOUS_IMAGE_DIGEST_ANNOTATION = f"{GROUP}/previous-image-digest"
"""An annotation on the claim: the previous image. The journal may need the previous image again."""

IMAGE_CHOICE_ANNOTATION = f"{GROUP}/image-chosen-by"
"""An annotation on the claim: `session` if the session's spec named the image, otherwise the installation's default."""

IMAGE_REFUSED_ANNOTATION = f"{GROUP}/image-refused"
"""An annotation on the claim: an image that refused this volume, because an earlier image must replay its journal."""

IMAGE_REFUSALS_ANNOTATION = f"{GROUP}/image-refusals"
"""An annotation on the claim: how often the image in `image-refused` refused this volume."""

CONFIGURATION_ANNOTATION = f"{GROUP}/configuration"
"""An annotation on each child: a hash of the desired object. A changed hash shows that a field was removed."""

INPUTS_ANNOTATION = f"{GROUP}/inputs"
"""An annotation on the pod: a hash of the inputs of the pod. If the hash changes, the worker must be restarted."""

SPEC_ANNOTATION = f"{GROUP}/asked"
"""An annotation on the worker's pod: a hash of the inputs that come from the session's spec.

If only the hash `inputs` changes, the installation's settings have changed.
"""

RESTART_REQUEST_ANNOTATION = f"{GROUP}/restart-requested-at"
"""An annotation that users set on a session or pool: a time. For each new time, the pods restart cleanly once."""

SNAPSHOT_REQUEST_ANNOTATION = f"{GROUP}/snapshot-requested-at"
"""An annotation that users set on a session: a time. For each new time, the worker writes one snapshot."""

WAKE_REQUEST_ANNOTATION = f"{GROUP}/wake-requested-at"
"""An annotation that users set on a session or pool: a time. Each new time ends a suspension because of idleness.

API servers write the same request into `status.wantedTime`, because they may not write anything but the status.
"""

RETIRED_ANNOTATION = f"{GROUP}/retired-at"
"""An annotation on a session with an outdated copy of its template: the time since when it takes no new models.

API servers place no models on it, and the operator deletes it while it holds no models.
"""

PAUSED_ANNOTATION = f"{GROUP}/paused"
"""An annotation that users set on a session or pool: with the value `true`, the operator writes nothing but the status.

A paused session or pool is still deleted with its children by Kubernetes, unless its finalizer waits for the operator.
"""

SKIP_FINALIZER_ANNOTATION = f"{GROUP}/skip-finalizer"
"""An annotation that users set on a session: with the value `true`, a deletion saves no adapter and keeps the claim."""

POD_RETRY_ANNOTATION = f"{GROUP}/pods-retried-at"
"""An annotation on a workload: when the operator last asked its controller to create refused pods again."""

CONVERSION_ANNOTATION = f"{GROUP}/conversion"
"""An annotation on the Job that converts a model: a hash of everything that determines its result."""

IMAGE_PULL_ANNOTATION = f"{GROUP}/image-pull"
"""An annotation on the Job that pulls an image: a hash of the image and the node."""

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
"""The name of the volume by which the operator recognises a pod that writes to the claim of a journal."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's label on a workload that belongs to a queue. The queue decides when the workload runs."""

RPC_PORT = 7443
HEALTH_PORT = 7080

WORKER_CONTAINER = "worker"


def claim_name(session_name: str) -> str:
    return f"{session_name}-journal"


def pool_workload_name(pool: str) -> str:
    """Return the name of a pool's workload. A session with the same name has another workload name."""
    return f"{pool}-sampler"


def certificate_secret_name(workload_name: str) -> str:
    return f"{workload_name}-tls"


def conversion_name(session_name: str) -> str:
    """Return the name of the Job. The name fits into Kubernetes' limit even for the longest session name."""
    return f"{session_name}-conversion"


def image_pull_name(session_name: str) -> str:
    """Return the name of the Job. The name fits into Kubernetes' limit even for the longest session name."""
    return f"{session_name}-image-pull"


def pod_name(session_name: str) -> str:
    return f"{session_name}-0"


def endpoint(session_name: str, namespace: str) -> str:
    return f"{session_name}.{namespace}.svc:{RPC_PORT}"


def worker_dns_name(worker_id: str) -> str:
    """Return the DNS name in a worker's certificate. Clients check the DNS name."""
    return f"{worker_id}.worker.tinsmith.internal"


SAMPLER_DNS_NAME = "sampler.tinsmith.internal"
"""A second name in the certificate of a pool's samplers.

A worker allows clients with this name in their certificate to fetch saves.
"""
