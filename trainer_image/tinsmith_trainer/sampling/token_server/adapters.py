"""Adapter versions as folders for a server, and the checks before a server loads a folder."""

from __future__ import annotations

import itertools
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.engines.peft_layout import write_each_expert
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.sampling.token_server.served_model import ServedModel

HEAD = "lm_head"
KEY_CHARACTERS = 32


class AdapterFilesLost(ServerError):
    """An adapter whose folder disappeared before the server read it. The same load may succeed later."""


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """A version in the server. After a drop, the version is unloaded as soon as `jobs` is 0.

    If `trains_head`, the adapter changes the unembedding.
    """

    name: str
    folder: Path
    trains_head: bool = False
    jobs: int = 0
    dropped: bool = False

    @property
    def can_go(self) -> bool:
        return self.dropped and self.jobs == 0


class AdapterFolders:
    """The folders of adapters in one scratch directory.

    The directory is emptied first, because an earlier process may have left adapters.
    """

    def __init__(self, scratch: Path | None) -> None:
        """Create the folders. The default scratch directory is below the machine's folder for temporary files."""
        if scratch is None:
            self._root = Path(tempfile.mkdtemp(prefix="tinsmith-adapters-"))
        else:
            self._root = scratch / "adapters"
            shutil.rmtree(self._root, ignore_errors=True)
            self._root.mkdir(parents=True)
        self._life = secrets.token_hex(4)
        self._numbers: Iterator[int] = itertools.count(1)

    def write(self, adapter_key: str, state: AdapterState, model: ServedModel) -> ServedAdapter:
        """Write the adapter under a new name.

        Names are never used twice, because a server's prefix cache and running jobs identify a version by the name.
        """
        name = f"{re.sub('[^A-Za-z0-9]', '-', adapter_key)[:KEY_CHARACTERS]}-{self._life}-{next(self._numbers)}"
        folder, unfinished = self._root / name, self._root / f".{name}"
        try:
            unfinished.mkdir()
            write_each_expert(unfinished, state.lora, state.tensors, str(model.directory))
            unfinished.rename(folder)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise ServerError(f"Adapter {adapter_key} cannot be written to {self._root}: {error.strerror}.") from error
        return ServedAdapter(name, folder, trains_head=f"weights/{HEAD}.lora_A" in state.tensors)

    def remove(self, adapter: ServedAdapter) -> None:
        shutil.rmtree(adapter.folder, ignore_errors=True)

    def remove_all(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def check_adapter(adapter_key: str, state: AdapterState, model: ServedModel) -> None:
    """Raise ServerError for an adapter of another model, and UserError if a server has no room for the adapter."""
    weights = {name: tensor for name, tensor in state.tensors.items() if name.startswith("weights/")}
    modules = sorted({name.removeprefix("weights/").rpartition(".")[0] for name in weights})
    for module in modules:
        for part, shape in zip("AB", _lora_shapes(adapter_key, module, model, state.lora.rank), strict=True):
            _check_shape(adapter_key, state, f"weights/{module}.lora_{part}", shape)
    if HEAD in modules and model.tied_embeddings:
        raise UserError(
            f"Adapter {adapter_key} trains the unembedding, which {model.info.architecture} shares with its embedding: "
            "this sampler's server cannot serve that. Create the adapter with train_unembed=False, or sample from a "
            "session or from a pool with engine: builtin."
        )


def _lora_shapes(
    adapter_key: str, module: str, model: ServedModel, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if module in model.experts:
        return model.experts[module].lora_shapes(rank)
    if module not in model.linear_shapes:
        raise ServerError(f"Adapter {adapter_key} has weights for {module}, which the base model does not have.")
    out_features, in_features = model.linear_shapes[module]
    return (rank, in_features), (out_features, rank)


def _check_shape(adapter_key: str, state: AdapterState, name: str, shape: tuple[int, ...]) -> None:
    tensor = state.tensors.get(name)
    if tensor is None or tensor.shape != shape:
        found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
        raise ServerError(f"Adapter {adapter_key}: {name} {found}; the base model needs {list(shape)}.")
