"""How many connections an address may have."""

from __future__ import annotations

import pytest
from tinsmith_server.cli.connections import Addresses


def test_an_address_has_as_many_as_it_may_and_each_that_ends_makes_room() -> None:
    addresses = Addresses(3, ())
    assert [addresses.enter("192.0.2.1") for _ in range(6)] == [True] * 3 + [False] * 3
    assert addresses.enter("192.0.2.2")
    addresses.leave("192.0.2.1")
    assert [addresses.enter("192.0.2.1") for _ in range(2)] == [True, False]
    for _ in range(3):
        addresses.leave("192.0.2.1")
    assert [addresses.enter("192.0.2.1") for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize("address", ["10.1.2.3", "2001:db8::7", ""])
def test_connections_of_a_trusted_proxy_say_nothing(address: str) -> None:
    addresses = Addresses(1, ("10.0.0.0/8", "2001:db8::7"))
    assert all(addresses.enter(address) for _ in range(5))
    addresses.leave(address)
