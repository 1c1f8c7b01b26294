"""A PostgreSQL and an S3 server in a cluster, with the Secrets by which an installation finds them."""

from __future__ import annotations

from typing import Any

IMAGE = "tinsmith.local/tinsmith/test-services:0.1.0"
BUCKET = "checkpoints"
PASSWORD = "only-for-tests"
POSTGRESQL_PORT, S3_PORT = 5432, 9000

DATABASE_SECRET = {"name": "database", "key": "url"}
STORAGE_SECRET = "checkpoint-storage"
# By default a probe fails after a second, and three of them take a service away from everybody.
PATIENT = {"periodSeconds": 3, "timeoutSeconds": 20, "failureThreshold": 6}

Object = dict[str, Any]


def postgresql(namespace: str) -> list[Object]:
    """Run PostgreSQL, with the Secret DATABASE_SECRET."""
    url = f"postgresql://tinsmith:{PASSWORD}@postgresql.{namespace}.svc:{POSTGRESQL_PORT}/postgres"
    probe = {"exec": {"command": ["pg_isready", "--host=127.0.0.1"]}, **PATIENT}
    container = _container("postgresql", ["postgresql"], POSTGRESQL_PORT, probe, POSTGRES_PASSWORD=PASSWORD)
    return [
        _secret(DATABASE_SECRET["name"], {DATABASE_SECRET["key"]: url}),
        _service("postgresql", POSTGRESQL_PORT),
        _deployment("postgresql", container),
    ]


def s3() -> list[Object]:
    """Run an S3 server, with the bucket and the Secret STORAGE_SECRET."""
    probe = {"httpGet": {"path": f"/{BUCKET}", "port": S3_PORT}, **PATIENT}
    container = _container("s3", ["s3", str(S3_PORT), BUCKET], S3_PORT, probe)
    keys = {"AWS_ACCESS_KEY_ID": "tinsmith", "AWS_SECRET_ACCESS_KEY": PASSWORD}
    return [_secret(STORAGE_SECRET, keys), _service("s3", S3_PORT), _deployment("s3", container)]


def s3_environment(namespace: str) -> dict[str, str]:
    """Return the variables, in addition to the Secret, by which clients find the server."""
    return {"AWS_ENDPOINT_URL_S3": f"http://s3.{namespace}.svc:{S3_PORT}", "AWS_REGION": "us-east-1"}


def _secret(name: str, content: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": content}


def _service(name: str, port: int) -> Object:
    spec = {"selector": {"app": name}, "ports": [{"port": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _container(name: str, command: list[str], port: int, readiness: Object, **environment: str) -> Object:
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": [{"name": variable, "value": value} for variable, value in environment.items()],
        "ports": [{"containerPort": port}],
        "readinessProbe": readiness,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
    }


def _deployment(name: str, container: Object) -> Object:
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    }
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}
