"""What a server is started with, whoever made it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"  # its routes load files and know no keys: nobody outside this pod may ask it
MOST_ADAPTERS_IN_A_BATCH = 8
"""Each takes memory of every GPU for the highest rank, so that more of them leave less room for sequences."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`extra` are arguments that come last, and so win over ours."""

    model: Path
    port: int
    gpus: int
    max_sequence_length: int
    max_rank: int
    max_loaded: int
    extra: tuple[str, ...] = ()

    @property
    def adapters_in_a_batch(self) -> int:
        return min(MOST_ADAPTERS_IN_A_BATCH, self.max_loaded)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command line, and variables beside those of this process."""

    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
