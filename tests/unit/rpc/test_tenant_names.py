"""Names of tenants: each is one folder, distinct from and outside of all others."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tinsmith_rpc.tenant_names import is_tenant_name

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._@+-]{0,62}[a-z0-9])?", fullmatch=True)


@given(NAMES)
@example("default")
@example("ada@example.org")
def test_plain_names_are_names(name: str) -> None:
    assert is_tenant_name(name)


@given(st.text(max_size=80))
@example("a..b")
@example("lab\n")
@example("\u017f")
def test_a_name_is_one_folder_on_any_file_system(name: str) -> None:
    if not is_tenant_name(name):
        return
    assert posixpath.normpath(posixpath.join("assets", name, "x")) == f"assets/{name}/x"
    assert name.isascii()
    assert name.casefold() == name
    assert not set(name) & set("/\\: \t\r\n\0%?#*\"'<>|")
    assert name.rstrip(". ") == name
    assert not name.startswith((".", "-"))
    assert 1 <= len(name) <= 64


@given(NAMES, NAMES)
def test_two_names_share_no_folder(one: str, other: str) -> None:
    """Names are compared as on file systems that ignore case, or write a colon as a dot."""
    folders = {f"assets/{name}/".casefold().replace(":", ".") for name in (one, other)}
    assert (len(folders) == 1) == (one == other)
    assert one == other or not f"assets/{one}/".startswith(f"assets/{other}/")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\\b", "a:b", "a b", "A", "\u00e4", "a.", "-a", "a" * 65, "a\n", "a\0"]
)
def test_a_name_that_may_be_another_folder_on_another_system_is_invalid(name: str) -> None:
    assert not is_tenant_name(name)
