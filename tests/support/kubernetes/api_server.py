"""The API server over one open connection, for tests that would otherwise start kubectl once per object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.client import ApiClient
from kubernetes.config import new_client_from_config
from testcluster.errors import ClusterError

Manifest = dict[str, Any]
JSON, MERGE_PATCH = "application/json", "application/merge-patch+json"
TIMEOUT_SECONDS = 100.0


@dataclass(frozen=True)
class _Resource:
    """A kind's entry in the discovery of its API group."""

    plural: str
    is_namespaced: bool


class ApiServer:
    """Requests to one API server. A refusal raises ClusterError with the API server's own message."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._resources: dict[tuple[str, str], _Resource] = {}

    def call(
        self, method: str, path: str, body: bytes | None = None, content_type: str = JSON, user: str | None = None
    ) -> Manifest:
        """Return the answer to one request; `user` impersonates a user or a ServiceAccount."""
        headers = {"Content-Type": content_type, "Accept": JSON}
        if user is not None:
            headers["Impersonate-User"] = user
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)  # type: ignore[no-untyped-call]
        # Not `ApiClient.call_api`, which encodes the body itself and cannot encode one nested thousands of levels deep.
        url = f"{self._client.configuration.host}{path}"
        pool = self._client.rest_client.pool_manager
        response = pool.request(method, url, body=body, headers=headers, timeout=TIMEOUT_SECONDS)
        if response.status >= 400:
            raise ClusterError(_message(response.status, response.data))
        answer: Manifest = json.loads(response.data)
        return answer

    def path(self, manifest: Manifest, namespace: str) -> str:
        """Return the path of the collection that objects of the manifest's kind are created in."""
        root, resource = _root(manifest["apiVersion"]), self._resource(manifest["apiVersion"], manifest["kind"])
        place = f"namespaces/{namespace}/" if resource.is_namespaced else ""
        return f"{root}/{place}{resource.plural}"

    def may(self, user: str, verb: str, namespace: str, resource: Mapping[str, str]) -> bool:
        """Ask whether the user has a right to a `resource`: its `resource`, `group`, `subresource` and `name`."""
        attributes = {"verb": verb, "namespace": namespace, **resource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(self.call("POST", path, json.dumps(review).encode(), user=user)["status"]["allowed"])

    def _resource(self, api_version: str, kind: str) -> _Resource:
        """Return the resource of a kind.

        Only kinds that were found are kept, since a fixture may install the others later.
        """
        if (api_version, kind) not in self._resources:
            for each in self.call("GET", _root(api_version))["resources"]:
                if "/" not in each["name"]:
                    self._resources[api_version, each["kind"]] = _Resource(each["name"], each["namespaced"])
        if (api_version, kind) not in self._resources:
            raise ClusterError(f"The API server serves no kind {kind} in {api_version}: install its definition first.")
        return self._resources[api_version, kind]


@dataclass(frozen=True)
class ApiNamespace:
    """One namespace of an API server."""

    api: ApiServer
    name: str

    def would_create(self, manifest: Manifest, user: str | None = None) -> Manifest:
        """Return the object as the API server would store it. Unknown fields are refused."""
        path = f"{self.api.path(manifest, self.name)}?dryRun=All&fieldValidation=Strict"
        return self.api.call("POST", path, json.dumps(manifest).encode(), user=user)

    def create(self, manifest: Manifest) -> Manifest:
        path = f"{self.api.path(manifest, self.name)}?fieldValidation=Strict"
        return self.api.call("POST", path, json.dumps(manifest).encode())

    def get(self, manifest: Manifest) -> Manifest:
        return self.api.call("GET", self._path_of_one(manifest))

    def merge(self, manifest: Manifest, patch: Manifest, subresource: str = "") -> Manifest:
        """Send a merge patch of the object. Unknown fields are refused."""
        path = f"{self._path_of_one(manifest)}{subresource and f'/{subresource}'}?fieldValidation=Strict"
        return self.api.call("PATCH", path, json.dumps(patch).encode(), MERGE_PATCH)

    def delete(self, manifest: Manifest) -> None:
        self.api.call("DELETE", self._path_of_one(manifest))

    @contextmanager
    def holding(self, manifest: Manifest) -> Iterator[Manifest]:
        """Create the object, and delete it in the end."""
        stored = self.create(manifest)
        try:
            yield stored
        finally:
            self.delete(manifest)

    def _path_of_one(self, manifest: Manifest) -> str:
        return f"{self.api.path(manifest, self.name)}/{manifest['metadata']['name']}"


@contextmanager
def connected(kubeconfig: Path) -> Iterator[ApiServer]:
    """Keep one connection to the API server of the kubeconfig's current context."""
    with new_client_from_config(config_file=str(kubeconfig), persist_config=False) as client:  # type: ignore[no-untyped-call]
        yield ApiServer(client)


def _root(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _message(status: int, body: bytes) -> str:
    """Return the message of the Status that the API server answers, or the text of a proxy before it."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body.decode(errors='replace')[:500]}"
