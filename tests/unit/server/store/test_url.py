from pathlib import Path

import pytest
from tinsmith_server.store.connection import BadStoreUrl, describe, driver_url, parse_store_url


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "postgresql+asyncpg"])
def test_every_way_to_say_postgresql_means_psycopg(scheme: str) -> None:
    url = parse_store_url(f"{scheme}://ada:secret@db:5433/tinsmith?sslmode=require")

    expected = "postgresql+psycopg://ada:secret@db:5433/tinsmith?sslmode=require"
    assert driver_url(url).render_as_string(hide_password=False) == expected


def test_a_sqlite_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert str(driver_url(parse_store_url("sqlite:///store.db"))) == f"sqlite+pysqlite:///{tmp_path}/store.db"
    assert str(driver_url(parse_store_url("sqlite:////data/a b.db"))) == "sqlite+pysqlite:////data/a b.db"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mysql://db/tinsmith", "cannot live in 'mysql'"),
        ("store.db", "cannot be read"),
        ("", "cannot be read"),
        ("postgresql://ada:secret@db:port/tinsmith", "cannot be read"),
        ("sqlite://", "one plain file"),
        ("sqlite:///:memory:", "one plain file"),
        ("sqlite:///file:store.db?uri=true", "one plain file"),
        ("sqlite:///store.db?mode=ro", "one plain file"),
        ("sqlite://data/store.db", "three slashes"),
    ],
)
def test_a_bad_url_is_one_clear_error_that_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(BadStoreUrl, match=message) as raised:
        parse_store_url(text)

    assert "sqlite:///" in str(raised.value) or "slashes" in str(raised.value)
    assert "secret" not in str(raised.value)


def test_descriptions_hold_neither_password_nor_query() -> None:
    url = parse_store_url("postgresql://ada:secret@db/tinsmith?password=secret")

    assert describe(url) == "postgresql://ada:***@db/tinsmith"
