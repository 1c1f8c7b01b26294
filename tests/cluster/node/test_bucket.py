"""A second installation in the cluster, whose checkpoints are in a bucket and not on a shared volume.

It gets no API key: the operator makes its first one.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import yaml
from cluster.node.conftest import EXAMPLES, MODEL, SESSION
from support.client.pipelined_program import Ending, checkpoint_run_folder, run_program
from support.client.sampling_load import sampling_load, wait_for_more
from support.kubernetes.installation import Installation, Object, wait_for
from support.kubernetes.reach import DNS, Place, address
from support.kubernetes.services import BUCKET, S3_PORT, STORAGE_SECRET, s3, s3_environment
from testcluster.cluster import Cluster
from testcluster.tar_files import extract_files

NAMESPACE = "tinsmith-bucket"
POOL = "tiny"

VALUES = {
    # The other installation's.
    "crds": {"install": False},
    "apiServer": {"service": {"type": "NodePort"}},
    "checkpoints": {
        "remote": {
            "url": f"s3://{BUCKET}/tinsmith",
            "environment": s3_environment(NAMESPACE),
            "secretName": STORAGE_SECRET,
        }
    },
}

# Runs in the API server's pod, which has the credentials.
READ_FOLDER = """
import fsspec, io, os, sys, tarfile
root = os.environ['TINSMITH_CHECKPOINT_ROOT'] + '/' + sys.argv[1]
files, path = fsspec.url_to_fs(root)
with tarfile.open(fileobj=sys.stdout.buffer, mode='w|') as archive:
    for name in files.find(path):
        content = files.cat_file(name)
        entry = tarfile.TarInfo(name[len(path):].lstrip('/'))
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
"""


@pytest.fixture(scope="module")
def in_bucket(installation: Installation) -> Iterator[Installation]:
    """Install a release with a bucket, in addition to the tier's own."""
    cluster: Cluster = installation.cluster
    cluster.make_namespace(NAMESPACE)
    second_release = Installation(cluster, NAMESPACE, VALUES, by_node_port=True)
    for manifest in s3():
        second_release.apply(manifest)
    second_release.apply(EXAMPLES / "tiny-model.yaml")
    second_release.kubectl("rollout", "status", "deployment/s3", "--timeout=300s")
    second_release.install()
    second_release.api_key = second_release.key_in(f"{second_release.release}-api-key")
    second_release.kubectl("wait", "job/make-tiny-model", "--for=condition=complete", "--timeout=420s")
    second_release.apply(EXAMPLES / "session.yaml")
    second_release.apply(small_pool())
    second_release.wait_ready(SESSION)
    second_release.kubectl("wait", "samplerpool", POOL, "--for=condition=Ready", "--timeout=120s")
    second_release.wait_answering()
    yield second_release
    second_release.uninstall()
    cluster.delete_namespace(NAMESPACE)


def test_a_program_trains_and_samples_with_its_checkpoints_in_a_bucket(
    in_bucket: Installation, undisturbed: Ending, tmp_path: Path
) -> None:
    def fetch_checkpoint(tinker_path: str) -> Path:
        return fetch_folder(in_bucket, checkpoint_run_folder(tinker_path), tmp_path)

    with in_bucket.service_client() as client:
        ending = run_program(client, MODEL, lambda: None, fetch_checkpoint)
        model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
        saved = model.save_weights_for_sampler("first").result().path
    assert ending == undisturbed
    weights = [lambda client: client.create_sampling_client(model_path=saved).result()]
    with sampling_load(in_bucket.connect, weights) as answers:
        # There are twelve questions: each is asked twice.
        wait_for_more(answers, 24)
    assert answers[0].conflicting == set()


def test_nothing_is_on_a_volume_but_journals_and_the_store(in_bucket: Installation) -> None:
    claims = in_bucket.kubectl("get", "persistentvolumeclaims", "--output=jsonpath={.items[*].metadata.name}")
    assert set(claims.split()) == {"models", f"{SESSION}-journal", f"{in_bucket.release}-api-server-data"}


@pytest.mark.parametrize("pod", [f"{SESSION}-0", POOL])
def test_workers_and_samplers_reach_the_bucket_and_names_and_nothing_else(pod: str, in_bucket: Installation) -> None:
    name = pod if pod != POOL else in_bucket.list("pod", f"tinsmith.dev/pool={POOL}")[0]["metadata"]["name"]
    place = Place(in_bucket.cluster, NAMESPACE, name)
    server = in_bucket.an_api_server()
    assert server is not None
    targets = {
        "bucket": f"s3.{NAMESPACE}.svc.cluster.local:{S3_PORT}",
        "names": DNS,
        "API server": f"{address(in_bucket.cluster, NAMESPACE, server)}:8000",
        "Kubernetes API": "kubernetes.default.svc.cluster.local:443",
    }
    assert place.reaches(targets) == {"bucket", "names"}


def test_api_servers_reach_no_worker_of_another_installation(
    installation: Installation, in_bucket: Installation, session: str
) -> None:
    server = in_bucket.an_api_server()
    assert server is not None
    workers = {
        one.namespace: f"{address(one.cluster, one.namespace, f'{session}-0')}:7443"
        for one in (installation, in_bucket)
    }
    assert Place(in_bucket.cluster, NAMESPACE, server).reaches(workers) == {NAMESPACE}


def small_pool() -> Object:
    manifest: Object = yaml.safe_load((EXAMPLES / "sampler-pool.yaml").read_text())
    manifest["spec"]["replicas"] = 1
    manifest["spec"]["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    return manifest


def fetch_folder(installation: Installation, folder: str, target: Path) -> Path:
    """Copy the only directory below a folder of the checkpoint root."""
    pod = wait_for(installation.an_api_server, 120, lambda: "no API server runs that reads the bucket")
    reading = ["exec", pod, "--", "python3", "-c", READ_FOLDER, folder]
    content = installation.cluster.kubectl_bytes("--namespace", installation.namespace, *reading)
    with tarfile.open(fileobj=BytesIO(content)) as files:
        extract_files(files, target)
    [directory] = [entry for entry in target.iterdir() if entry.is_dir()]
    return directory
