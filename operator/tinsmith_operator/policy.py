"""The policy for names in sessions and pools.

Names of the installation's own objects are not allowed. Images and Secrets must match the installation's lists.

A user who may write a session can read everything that the session's pods receive. The CRDs contain the same rules for
names that are known before an installation. The chart's ValidatingAdmissionPolicy contains the rules for all names. The
rules in this module cover objects that were stored before the CRDs and the policy were installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.references import Reference, ReferenceKind

ANY = "*"

SECRET_PATTERN = re.compile(r".*-tls|sh\.helm\.release\..*|tinsmith-(ca|api-key|given-key)")
"""Patterns for the Secrets of certificates, of Helm releases, and of an installation with the default name.

The CRDs refuse the same names.
"""
CLAIM_PATTERN = re.compile(r".*-api-server-data|tinsmith-checkpoints")
"""The claims for the store and for the checkpoints, in an installation with the default name."""

LOADER_VARIABLES = (
    r"(PYTHON|LD_|BASH_|PERL5|VLLM_|SGLANG_|SGL_|RAY_|TORCH|TRITON_|GCONV_|GLIBC_|OPENSSL_|OMP_TOOL|CUDA_INJECTION"
    r"|CUDA_CACHE|NVTX_INJECTION|NCCL_CONF|NCCL_[A-Z_]*PLUGIN|UCX_MODULE_DIR|FI_PROVIDER_PATH|XDG_|FLASHINFER_|DG_JIT_"
    r"|NUMBA_CACHE|TVM_LIBRARY)[A-Za-z0-9_]*|ENV|PATH|CC|CXX|HF_ENDPOINT"
)
"""The variables by which interpreters, loaders and servers find code or compiled kernels.

The volume of a model may contain code that such a variable could load. The chart's policy has the same pattern.
"""
SERVER_ARGUMENTS = (
    r"--(gpu[-_]memory[-_]utilization|mem[-_]fraction[-_]static|max[-_]num[-_]seqs|max[-_]num[-_]batched[-_]tokens"
    r"|max[-_]model[-_]len|max[-_]running[-_]requests|max[-_]total[-_]tokens|max[-_]prefill[-_]tokens"
    r"|chunked[-_]prefill[-_]size|(no[-_])?enable[-_]chunked[-_]prefill|(no[-_])?enable[-_]prefix[-_]caching"
    r"|(no[-_])?async[-_]scheduling|block[-_]size|page[-_]size|swap[-_]space|cpu[-_]offload[-_]gb|kv[-_]cache[-_]dtype"
    r"|quantization|dtype|seed|random[-_]seed|enforce[-_]eager|attention[-_]backend|sampling[-_]backend|lora[-_]backend"
    r"|lora[-_]dtype|max[-_]loras|max[-_]cpu[-_]loras|fully[-_]sharded[-_]loras|enable[-_]expert[-_]parallel"
    r"|schedul(e|ing)[-_]policy|schedule[-_]conservativeness|disable[-_]cuda[-_]graph|cuda[-_]graph[-_]max[-_]bs"
    r"|disable[-_]radix[-_]cache|disable[-_]overlap[-_]schedule|disable[-_]custom[-_]all[-_]reduce"
    r"|enable[-_]deterministic[-_]inference|disable[-_]log[-_]stats|log[-_]level)(=.*)?|[^-].*|-[0-9.]+"
)
"""The arguments of vLLM and SGLang that cannot load code. The chart's policy has the same pattern."""

TAG_OR_DIGEST = r"(:[A-Za-z0-9_.-]+)?(@[a-z0-9]+:[0-9a-f]+)?"


class Objection(NamedTuple):
    """The reason why pods are not allowed, and a sentence about the reason, without the full stop."""

    reason: Reason
    words: str


@dataclass(frozen=True)
class Reserved:
    """The names of the installation's own Secrets, claims and ServiceAccounts.

    Sessions may pull images with the `pull_secrets`, but may not read the content of these Secrets.
    """

    secrets: frozenset[str] = frozenset()
    pull_secrets: frozenset[str] = frozenset()
    claims: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Policy:
    """The platform team's rules for names.

    - `own_image`: the default image. All images in the repository of this image may run.
    - `allowed_images`, `allowed_secrets`: patterns; `*` in a pattern stands for any text. The pattern `*` allows all
      names.
    """

    own_image: str
    reserved: Reserved = Reserved()
    allowed_images: tuple[str, ...] = (ANY,)
    allowed_secrets: tuple[str, ...] = (ANY,)

    def objection(self, references: Iterable[Reference]) -> Objection | None:
        """Return the objection to the first reference that is not allowed, or None if all references are allowed."""
        return next((found for each in references if (found := self._objection_to(each)) is not None), None)

    def allows_image(self, image: str) -> bool:
        return self._is_own(image) or _matches(image, self.allowed_images, TAG_OR_DIGEST)

    def vouches_for(self, image: str) -> bool:
        """Return whether the platform team chose the image.

        The platform team chose the default image and all images that match `allowed_images`, except by the pattern `*`.
        """
        listed = (pattern for pattern in self.allowed_images if pattern != ANY)
        return self._is_own(image) or _matches(image, listed, TAG_OR_DIGEST)

    def _objection_to(self, reference: Reference) -> Objection | None:
        field, what, name = reference
        if self._is_reserved(what, name):
            return Objection(Reason.NAME_RESERVED, f"{what.value} {name} ({field}) belongs to the installation")
        if what is ReferenceKind.IMAGE and not self.allows_image(name):
            return Objection(Reason.IMAGE_NOT_ALLOWED, f"Image {name} ({field}) is not allowed here")
        if self._loads_code(what, name):
            words = f"{what.value.capitalize()} {name} ({field}) could load code from outside the image"
            return Objection(Reason.CODE_NOT_ALLOWED, words)
        if what in (ReferenceKind.READ_SECRET, ReferenceKind.PULL_SECRET) and not _matches(name, self.allowed_secrets):
            return Objection(Reason.SECRET_NOT_ALLOWED, f"{what.value} {name} ({field}) is not allowed here")
        return None

    def _is_reserved(self, what: ReferenceKind, name: str) -> bool:
        reserved = self.reserved
        match what:
            case ReferenceKind.READ_SECRET:
                known = reserved.secrets | reserved.pull_secrets
                return name in known or SECRET_PATTERN.fullmatch(name) is not None
            case ReferenceKind.PULL_SECRET | ReferenceKind.OWN_SECRET:
                return name in reserved.secrets
            case ReferenceKind.CLAIM:
                return name in reserved.claims or CLAIM_PATTERN.fullmatch(name) is not None
            case ReferenceKind.ACCOUNT:
                return name in reserved.accounts
            case ReferenceKind.IMAGE | ReferenceKind.VARIABLE | ReferenceKind.ARGUMENT:
                return False

    def _loads_code(self, what: ReferenceKind, name: str) -> bool:
        """Return whether a variable or argument could load code, if the installation limits images to a list."""
        if ANY in self.allowed_images:
            return False
        if what is ReferenceKind.VARIABLE:
            return re.fullmatch(LOADER_VARIABLES, name) is not None
        return what is ReferenceKind.ARGUMENT and re.fullmatch(SERVER_ARGUMENTS, name) is None

    def _is_own(self, image: str) -> bool:
        """Return whether the image is in the repository of the default image, with any tag or digest."""
        plain = re.fullmatch(re.escape(as_written(image)) + TAG_OR_DIGEST, image)
        return plain is not None and repository_of(image) == repository_of(self.own_image)


def _matches(name: str, patterns: Iterable[str], ending: str = "") -> bool:
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*") + ending, name) for pattern in patterns)


def repository_of(reference: str) -> str:
    """Return the full repository without tag and digest: `team/trainer:1` becomes `docker.io/team/trainer`."""
    name = as_written(reference)
    first, slash, rest = name.partition("/")
    is_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    if is_host and first != "docker.io":
        return name
    path = rest if is_host else name
    return f"docker.io/{path}" if "/" in path else f"docker.io/library/{path}"


def as_written(reference: str) -> str:
    """Return the repository without tag and digest, but otherwise unchanged."""
    name = reference.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"
