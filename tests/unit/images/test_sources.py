from __future__ import annotations

from pathlib import Path

import pytest
from images.sources import Image

DOCKERFILE = """# COPY nothing
FROM base AS dependencies
COPY requirements.txt /opt/requirements.txt
RUN install \\
    # COPY comments
    --quiet
FROM dependencies AS packages
COPY package README.md /source/
FROM dependencies
COPY --from=packages /packages /opt
"""


@pytest.fixture
def image(tmp_path: Path) -> Image:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "package" / "part").mkdir(parents=True)
    for name in (".dockerignore", "requirements.txt", "README.md", "unused.py", "package/a.py", "package/part/b.py"):
        (tmp_path / name).write_text(name)
    return Image("example", tmp_path / "Dockerfile", tmp_path)


@pytest.mark.parametrize("name", ["Dockerfile", ".dockerignore", "requirements.txt", "package/part/b.py"])
def test_the_sources_of_an_image_are_its_identity(image: Image, name: str) -> None:
    before = image.digest()
    with (image.root / name).open("a") as file:
        file.write("# more\n")
    assert image.digest() != before


@pytest.mark.parametrize("name", ["unused.py", "package/__pycache__/a.cpython-313.pyc"])
def test_files_outside_the_sources_do_not_change_the_identity(image: Image, name: str) -> None:
    before = image.digest()
    (image.root / name).parent.mkdir(exist_ok=True)
    (image.root / name).write_text("changed")
    assert image.digest() == before


def test_a_dockerfile_that_copies_a_missing_file_is_refused(image: Image) -> None:
    (image.root / "README.md").unlink()
    with pytest.raises(FileNotFoundError):
        image.digest()
