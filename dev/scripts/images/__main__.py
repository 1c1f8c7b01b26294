"""`python -m images`, with dev/scripts/ on PYTHONPATH: build, clean, or test the trainer's image."""

from __future__ import annotations

import argparse
import json
import sys

from images.archives import build_images, clean_images
from images.commands import ImageError
from images.running import run_trainer_tests
from images.sources import IMAGES, OPTIONAL_IMAGES


def main() -> int:
    parser = argparse.ArgumentParser(prog="images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build the images, and print where their archives are, as JSON")
    known = f"of {', '.join(IMAGES | OPTIONAL_IMAGES)}; default: {', '.join(IMAGES)}"
    build.add_argument("names", nargs="*", metavar="NAME", help=known)
    commands.add_parser("clean", help="remove the archives and the build's cache")
    test = commands.add_parser("test-trainer", help="run the trainer's tests on the image's Python and torch")
    test.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args()
    if unknown := set(getattr(options, "names", ())) - set(IMAGES | OPTIONAL_IMAGES):
        parser.error(f"there is no image {', '.join(sorted(unknown))}: they are {', '.join(IMAGES | OPTIONAL_IMAGES)}")
    try:
        return _do(options)
    except ImageError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1


def _do(options: argparse.Namespace) -> int:
    if options.command == "test-trainer":
        return run_trainer_tests(options.arguments)
    if options.command == "clean":
        clean_images((IMAGES | OPTIONAL_IMAGES).values())
        return 0
    images = OPTIONAL_IMAGES | IMAGES
    archives = build_images(images[name] for name in options.names or IMAGES)
    print(json.dumps({name: str(archive.path) for name, archive in archives.items()}, indent=2))
    return 0


sys.exit(main())
