"""Archives of the images of a checkout. An image is built again only if it has changed."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from images.buildah import Buildah
from images.builder import BASE, Builder
from images.commands import ImageError, run
from images.docker import Docker
from images.sources import IMAGES, ROOT, Image

# A test run that still uses the previous archive may import it.
KEPT_ARCHIVES = 2


def cache_directory() -> Path:
    """Return the folder of the cache.

    The folder is outside the checkout, so that a fresh clone can use earlier builds.
    """
    return Path(os.environ.get("TINSMITH_CACHE") or Path.home() / ".cache" / "tinsmith")


@dataclass(frozen=True)
class Archive:
    """An image in a docker-archive."""

    reference: str
    path: Path


def build_images(images: Iterable[Image]) -> dict[str, Archive]:
    """Return the archive of each image, by name. Progress is printed on standard error. Raises ImageError."""
    cache = cache_directory()
    with _locked(cache / "images" / "lock"):
        return {image.name: _archive(image, cache) for image in images}


@lru_cache
def build_to_run(name: str) -> Builder:
    """Return a builder that has built or loaded the image of this checkout.

    The builder knows the image by its reference. The image comes from this build or an earlier build.
    """
    cache = cache_directory()
    with _locked(cache / "images" / "lock"):
        return _build(IMAGES[name], cache)


def find_builder(cache: Path) -> Builder:
    """Return docker if its daemon answers, otherwise buildah.

    Raises ImageError if neither docker nor buildah is available.
    """
    if Docker.works():
        return Docker()
    if Buildah.works():
        return Buildah(cache / "containers")
    raise ImageError(
        "There is nothing to build images with: start a docker daemon (with buildx), or install buildah and "
        "debootstrap: `apt-get install buildah debootstrap`."
    )


def clean_images(images: Collection[Image]) -> None:
    """Remove every archive, the project's images, and the builder's caches."""
    cache = cache_directory()
    with _locked(cache / "images" / "lock"):
        tags = [tag for image in images for tag in (image.reference, *map(image.stage_tag, image.stages))]
        find_builder(cache).clean(tags)
        for file in (cache / "images").glob("*.*"):
            file.unlink()


def _archive(image: Image, cache: Path) -> Archive:
    path = cache / "images" / f"{_prefix(image)}{image.digest()}.tar"
    if path.exists():
        _say(f"{image.name}: unchanged")
        path.touch()
    else:
        builder = _build(image, cache)
        with _timed(f"{image.name}: archive"):
            _save(builder, image, path)
        _forget_old_archives(image, path.parent)
    _say(f"{image.name}: {image.reference}, {path.stat().st_size / 1e6:.0f} MB, {path}")
    return Archive(image.reference, path)


def _prefix(image: Image) -> str:
    """Return the prefix of the names of the image's archives. Each tag has a different prefix."""
    return f"{image.name}_{image.tag}-"


def _prepare_base(builder: Builder) -> None:
    """Prepare the image of Debian. Without access to a registry, make the same image from Debian's packages."""
    if builder.has_base():
        return
    try:
        with _timed(f"pulling {BASE}"):
            builder.pull_base()
    except ImageError as error:
        _say(f"{BASE} cannot be pulled; it is made of Debian's packages instead.")
        _make_base(builder, error)


def _make_base(builder: Builder, refusal: ImageError) -> None:
    if os.geteuid() != 0:
        raise ImageError(f"{BASE} cannot be pulled, and only root can make it with debootstrap. {refusal}")
    with _timed(f"debootstrap for {BASE}"), TemporaryDirectory(prefix="tinsmith-base-") as directory:
        run(ROOT / "dev" / "scripts" / "debian-base", directory)
        builder.import_base(Path(directory))


def _build(image: Image, cache: Path) -> Builder:
    """Build each stage separately.

    A stage that is built separately has a name, so that pruning keeps its layers for the next build.
    """
    builder = find_builder(cache)
    _prepare_base(builder)
    log = cache / "images" / f"{image.name}.log"
    log.write_text("")
    with build_secrets() as secrets:
        for stage in image.stages:
            with _timed(f"{image.name}: {stage}"):
                builder.build(image, image.stage_tag(stage), secrets, log, stage)
        with _timed(f"{image.name}: image"):
            builder.build(image, image.reference, secrets, log)
    _prune(builder)
    return builder


def _prune(builder: Builder) -> None:
    """Remove images and layers that the builder no longer needs.

    An image that a container uses is kept, even if the program that started the container was killed.
    """
    try:
        builder.prune()
    except ImageError as error:
        _say(f"not everything unused could be removed: {error}")


def _save(builder: Builder, image: Image, path: Path) -> None:
    """Save the archive. The archive gets its final name when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    builder.save(image.reference, unfinished)
    unfinished.rename(path)


def _forget_old_archives(image: Image, directory: Path) -> None:
    archives = sorted(directory.glob(f"{_prefix(image)}*.tar"), key=lambda file: file.stat().st_mtime)
    for archive in archives[:-KEPT_ARCHIVES]:
        archive.unlink()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock while an image is built.

    Two builds at the same time would do the same work, and each would remove layers of the other build.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        flock(handle, LOCK_EX)
        yield


@contextmanager
def _timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    _say(f"{what}: {time.monotonic() - started:.1f} s")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


CERTIFICATES_IN_BUILD = "/run/secrets/ca-certificates"
_CERTIFICATE_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_DEBIANS_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@contextmanager
def build_secrets(environment: Mapping[str, str] = os.environ) -> Iterator[dict[str, Path]]:
    """Yield the files of the secrets that the Dockerfiles mount, by name. The files exist while the context is open."""
    with TemporaryDirectory(prefix="tinsmith-build-") as directory:
        file = Path(directory) / "build-environment"
        file.touch(mode=0o600)
        secrets = {"build-environment": file}
        variables = passed_variables(environment)
        certificates = _certificates(environment)
        if certificates is not None:
            secrets["ca-certificates"] = certificates
            variables |= dict.fromkeys(_CERTIFICATE_VARIABLES, CERTIFICATES_IN_BUILD)
        file.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items())))
        yield secrets


def passed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy variables and the settings of pip.

    Paths are left out, because a build cannot see these paths.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.lower() in _PROXY_VARIABLES or (name.startswith("PIP_") and not value.startswith(("/", "~", ".")))
    }


def _certificates(environment: Mapping[str, str]) -> Path | None:
    named = (Path(environment[name]) for name in _CERTIFICATE_VARIABLES if environment.get(name))
    return next((file for file in (*named, _DEBIANS_CERTIFICATES) if file.is_file()), None)
