"""The files of a model's directory that a worker gives away."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.worker import tokenizer_files
from tinsmith_trainer.worker.tokenizer_files import read_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes(b"vocabulary")
    return directory


def test_the_digest_changes_with_each_name_and_each_content(model: Path) -> None:
    digests = [read_tokenizer(model).digest]
    (model / "merges.txt").write_bytes(b"a b")
    digests.append(read_tokenizer(model).digest)
    (model / "merges.txt").rename(model / "chat_template.jinja")
    digests.append(read_tokenizer(model).digest)
    (model / "chat_template.jinja").write_bytes(b"a c")
    digests.append(read_tokenizer(model).digest)
    assert len(set(digests)) == 4
    assert read_tokenizer(model).digest == digests[-1]


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json"])
def test_a_link_that_leads_outside_of_the_model_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "model-of-another" / "tokenizer.json"
    outside.parent.mkdir()
    outside.write_bytes(b"secret")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(outside)
    with pytest.raises(UserError, match=f"{name} of the base model is a link to a file outside") as refused:
        read_tokenizer(model)
    assert str(tmp_path) not in str(refused.value)


def test_a_directory_that_is_a_link_leads_outside_too(model: Path, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "merges.txt").write_bytes(b"secret")
    (model / "deeper").symlink_to(secrets)
    (model / "merges.txt").symlink_to("deeper/merges.txt")
    with pytest.raises(UserError, match="outside"):
        read_tokenizer(model)


def hub_cache(root: Path) -> Path:
    repository = root / "models--org--tiny"
    snapshot, blob = repository / "snapshots" / "0123", repository / "blobs" / "abc"
    snapshot.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_bytes(b"from the hub")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    return snapshot


def test_a_snapshot_in_the_hubs_cache_links_to_its_own_blobs(tmp_path: Path) -> None:
    assert read_tokenizer(hub_cache(tmp_path)).files == {"tokenizer.json": b"from the hub"}


def test_a_snapshot_does_not_reach_the_blobs_of_another_model(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    blob = tmp_path / "models--org--private" / "blobs" / "abc"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"secret")
    (snapshot / "merges.txt").symlink_to(blob)
    with pytest.raises(UserError, match=r"merges\.txt"):
        read_tokenizer(snapshot)


def test_more_than_the_limit_in_all_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "MOST_BYTES", 20)
    (model / "merges.txt").write_bytes(bytes(10))
    assert sum(map(len, read_tokenizer(model).files.values())) == 20
    (model / "merges.txt").write_bytes(bytes(11))
    with pytest.raises(UserError, match="more than 20 bytes"):
        read_tokenizer(model)


@pytest.mark.parametrize("directory", ["empty", "not/there"])
def test_a_directory_without_a_vocabulary_has_no_tokenizer(tmp_path: Path, directory: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tokenizer_config.json").write_bytes(b"{}")
    with pytest.raises(UserError, match="has no tokenizer"):
        read_tokenizer(tmp_path / directory)


def test_a_file_that_cannot_be_read_is_the_servers_fault(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ServerError, match=r"tokenizer\.json of the base model cannot be read: Permission denied"):
        read_tokenizer(model)
