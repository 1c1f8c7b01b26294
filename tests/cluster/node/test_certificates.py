"""Certificates are renewed under a program at work: processes read the new files without a restart."""

from __future__ import annotations

import base64

from cluster.node.conftest import SESSION, Run
from support.client.pipelined_program import Ending
from support.kubernetes.installation import API_SERVER, Installation, wait_for

WORKER = f"{SESSION}-0"

# Runs in the API server's pod. In TLS 1.3 a server shows its certificate before it asks for the client's.
SHOW_CERTIFICATE = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 7443)))"


def test_a_program_continues_with_renewed_certificates(
    installation: Installation, run: Run, undisturbed: Ending
) -> None:
    def renew_and_lose_every_connection() -> None:
        of_worker = renew(installation, f"{SESSION}-tls", [WORKER])
        renew(installation, f"{installation.release}-api-server-tls", servers)
        assert shown_by_worker(installation, servers[0]) == of_worker
        assert restarts(installation, WORKER) == worker_restarts
        # Only what connects anew shows what it has.
        installation.cluster.kill_container(installation.namespace, WORKER, "worker")

    worker_restarts = restarts(installation, WORKER)
    servers = api_server_pods(installation)
    server_restarts = [restarts(installation, server) for server in servers]
    ending = run(renew_and_lose_every_connection)
    assert ending.ran_each_step_once()
    assert ending == undisturbed
    assert api_server_pods(installation) == servers
    assert [restarts(installation, server) for server in servers] == server_restarts


def renew(installation: Installation, secret: str, pods: list[str]) -> str:
    """Delete a certificate, which the operator issues anew, and return it once every pod has it."""
    before = certificate_in(installation, secret)
    installation.kubectl("delete", "secret", secret)

    def issued() -> str | None:
        found = certificate_in(installation, secret)
        return found if found != before else None

    after = wait_for(issued, 60, lambda: f"Secret {secret} does not come back")
    # The kubelet looks at a pod's volumes once a minute, and at every change of the pod.
    installation.kubectl("annotate", "pod", *pods, "--overwrite", f"tinsmith.test/looked-at={hash(after)}")

    def arrived() -> bool:
        reading = (installation.kubectl("exec", pod, "--", "cat", "/etc/tinsmith/tls/tls.crt") for pod in pods)
        return all(content == after for content in reading)

    wait_for(arrived, 180, lambda: f"not all of {', '.join(pods)} have got their new certificate")
    return after


def certificate_in(installation: Installation, secret: str) -> str | None:
    found = installation.get("secret", secret)
    return base64.b64decode(found["data"]["tls.crt"]).decode() if found is not None else None


def shown_by_worker(installation: Installation, pod: str) -> str:
    host = f"{SESSION}.{installation.namespace}.svc"
    shown = installation.kubectl("exec", pod, "--", "python3", "-c", SHOW_CERTIFICATE, host)
    return f"{shown.strip()}\n"


def api_server_pods(installation: Installation) -> list[str]:
    pods = installation.list("pod", API_SERVER)
    return sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])


def restarts(installation: Installation, pod: str) -> int:
    [status] = (installation.get("pod", pod) or {})["status"]["containerStatuses"]
    count: int = status["restartCount"]
    return count
