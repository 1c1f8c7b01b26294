"""The references in a spec: Secrets, claims, a ServiceAccount, an image, variables and server arguments."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from tinsmith_operator.api.names import certificate_secret_name
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.sampler_pool import SamplerPool
from tinsmith_operator.api.serving_spec import ServingSpec
from tinsmith_operator.api.training_session import TrainingSession


class ReferenceKind(StrEnum):
    """The kind of a reference.

    READ_SECRET: the processes in the pod read the Secret. PULL_SECRET: only the node reads the Secret. OWN_SECRET: the
    operator creates the Secret for the session or pool. The Secret's name is derived from the owner's name.
    """

    READ_SECRET = "Secret"
    PULL_SECRET = "pull Secret"
    OWN_SECRET = "certificate's Secret"
    CLAIM = "PersistentVolumeClaim"
    ACCOUNT = "ServiceAccount"
    IMAGE = "image"
    VARIABLE = "variable"
    ARGUMENT = "server argument"


class Reference(NamedTuple):
    """A name in a spec. `field` is the field that contains this name."""

    field: str
    what: ReferenceKind
    name: str


def references_of(owner: Owner) -> Iterator[Reference]:
    """Yield all names that a session or pool uses."""
    yield Reference("metadata.name", ReferenceKind.OWN_SECRET, certificate_secret_name(owner.workload_name))
    if isinstance(owner, TrainingSession):
        field = "spec.storage.existingClaim" if owner.spec.storage.existing_claim is not None else "metadata.name"
        yield Reference(field, ReferenceKind.CLAIM, owner.claim_name)
    for field, claim in owner.spec.model_claims.items():
        yield Reference(field, ReferenceKind.CLAIM, claim)
    yield from _secrets_of(owner.spec)
    pod = owner.spec.pod
    if pod.service_account_name is not None:
        yield Reference("spec.pod.serviceAccountName", ReferenceKind.ACCOUNT, pod.service_account_name)
    if pod.image is not None:
        yield Reference("spec.pod.image", ReferenceKind.IMAGE, pod.image)
    for variable in pod.env:
        yield Reference("spec.pod.env", ReferenceKind.VARIABLE, str(variable["name"]))
    if isinstance(owner, SamplerPool):
        for word in owner.spec.server_arguments:
            yield Reference("spec.serverArguments", ReferenceKind.ARGUMENT, word)


def _secrets_of(spec: ServingSpec) -> Iterator[Reference]:
    hub = spec.model.source.hub
    if hub is not None and hub.token_secret_ref is not None:
        yield Reference("spec.model.source.hub.tokenSecretRef", ReferenceKind.READ_SECRET, hub.token_secret_ref.name)
    for variable in spec.pod.env:
        if key := (variable.get("valueFrom") or {}).get("secretKeyRef"):
            yield Reference(f"variable {variable['name']} of spec.pod.env", ReferenceKind.READ_SECRET, str(key["name"]))
    for secret in spec.pod.image_pull_secrets:
        yield Reference("spec.pod.imagePullSecrets", ReferenceKind.PULL_SECRET, str(secret["name"]))
