"""Kubernetes quantities, as far as comparing them goes."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"^([+-]?[0-9.]+)(?:([eE][+-]?[0-9]+)|([numkMGTPE]?|[KMGTPE]i))$")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def parse_quantity(quantity: int | float | str) -> Decimal:
    """Raises ValueError when it is none."""
    match = _FORM.match(str(quantity))
    if match is None or match[1].count(".") > 1:
        raise ValueError(f"{quantity!r} is not a quantity such as 500m, 16Gi or 1")
    number, exponent, suffix = Decimal(match[1]), match[2], match[3] or ""
    if exponent:
        return number.scaleb(int(exponent[1:]))
    return number * 2 ** _BINARY[suffix] if suffix in _BINARY else number.scaleb(_DECIMAL[suffix])
