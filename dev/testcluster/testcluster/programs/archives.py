"""Archives of two kinds of images: an image of a program that needs no other files, and a variant of another image.

This module also reads the names of images in any archive.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

PAUSE_IMAGE = "tinsmith.local/tinsmith/test-pause:1"
_MEDIA = "application/vnd.oci.image"
_NAME = "io.containerd.image.name"


def write_archive(file: Path, image: str, program: Path) -> Path:
    """Write a docker archive with one layer: `program` as `/<name>`, which is also the entry point.

    The same program always gives the same image, because the archive contains no time.
    """
    layer = _tar({program.name: (program.read_bytes(), 0o755)})
    architecture = "arm64" if program.read_bytes()[18:20] == b"\xb7\x00" else "amd64"
    settings = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65532:65532"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    encoded = json.dumps(settings).encode()
    name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [image], "Layers": ["layer.tar"]}]
    contents = {name: encoded, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    file.write_bytes(_tar({path: (content, 0o644) for path, content in contents.items()}))
    return file


def write_variant(file: Path, image: str, original: Path, mark: str) -> Path:
    """Write an OCI archive with the name `image`. The image behaves like `original`. Each `mark` gives another digest.

    The archive contains no layers, so only a node that has loaded the original can load the archive. Loading the
    archive takes no time.
    """
    with tarfile.open(original) as archive:
        [contained] = json.loads(_read(archive, "manifest.json"))
        settings = json.loads(_read(archive, contained["Config"]))
        sizes = [archive.getmember(layer).size for layer in contained["Layers"]]
    settings["config"] = {**settings["config"], "Labels": {"tinsmith.test/mark": mark}}
    layers = [
        {"mediaType": f"{_MEDIA}.layer.v1.tar", "digest": digest, "size": size}
        for digest, size in zip(settings["rootfs"]["diff_ids"], sizes, strict=True)
    ]
    config, blobs = _blob(f"{_MEDIA}.config.v1+json", settings, {})
    manifest, blobs = _blob(
        f"{_MEDIA}.manifest.v1+json", {"schemaVersion": 2, "config": config, "layers": layers}, blobs
    )
    named = {**manifest, "annotations": {_NAME: image}}
    index = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    contents = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index, **blobs}
    file.write_bytes(_tar({path: (content, 0o644) for path, content in contents.items()}))
    return file


def image_names(file: Path) -> list[str]:
    """Return the names of the images: tags in a docker archive, or annotations in an OCI archive."""
    with tarfile.open(file) as archive:
        if "manifest.json" in archive.getnames():
            return [name for image in json.loads(_read(archive, "manifest.json")) for name in image["RepoTags"] or ()]
        named = [image.get("annotations", {}) for image in json.loads(_read(archive, "index.json"))["manifests"]]
    return [annotations[_NAME] for annotations in named if _NAME in annotations]


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    assert member is not None, f"{name} is no file"
    return member.read()


def _blob(media_type: str, document: object, others: Mapping[str, bytes]) -> tuple[dict[str, object], dict[str, bytes]]:
    """Return the descriptor of the blob, and all blobs by path."""
    content = json.dumps(document).encode()
    digest = hashlib.sha256(content).hexdigest()
    descriptor = {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}
    return descriptor, {**others, f"blobs/sha256/{digest}": content}


def _tar(contents: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, (content, mode) in contents.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
