from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IndepDPInfo:
    cell_index: int

    @classmethod
    def create_trivial(cls) -> IndepDPInfo:
        return cls(0)
