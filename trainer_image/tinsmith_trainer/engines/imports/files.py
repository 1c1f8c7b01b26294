"""Import of an adapter's two files, in PEFT's layout or Tinker's, as an adapter state.

The files are not trusted. Weights must be safetensors. Names, shapes and rank must fit an adapter on this base model.
If a module of an announced family is missing in the files, it is initialized as in a new adapter. B of this module is
zero, so the module has no effect until it is trained.

PEFT may write copies of the base model's embeddings into the file. PEFT writes the output projection if the projection
has an adapter, and both embeddings if the user requests them or the vocabulary was resized. Copies have no effect. An
embedding that differs from the base model's embedding is refused, because a changed embedding is not LoRA.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from torch import Tensor

from tinsmith_trainer.engines import adapters
from tinsmith_trainer.engines.base import AdapterState, AnnouncedAdapter, LoraSpec
from tinsmith_trainer.engines.imports.config import read_rank_and_alpha
from tinsmith_trainer.engines.imports.experts import NotShared, fit_shape, to_tinker_experts
from tinsmith_trainer.engines.imports.size_limits import FAMILIES, Shapes, ShapesOf, SizeLimits
from tinsmith_trainer.engines.peft_layout import CONFIG_FILE, WEIGHTS_FILE
from tinsmith_trainer.errors import CheckpointInvalid
from tinsmith_trainer.torch_model.lora import UNEMBED_NAME, module_family
from tinsmith_trainer.torch_model.weight_files import ROWS_AT_ONCE, StoredTensor, pickled, stored_tensors

EMBEDDINGS_KEY = re.compile(
    r"base_model\.model\.(?:[\w.]{1,200}\.)?(?P<name>embed_tokens|lm_head)(?:\.base_layer)?\.weight"
)
STORED_NAME = re.compile(r"(?:.*\.)?(?P<name>embed_tokens|lm_head)\.weight")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of models; a conversion between these dtypes may round values.

Before a save, a bfloat16 model may be loaded as float32, and a float32 model as bfloat16.
"""

Embeddings = Mapping[str, StoredTensor]
"""The base model's embeddings, by the last part of the module's name."""
NO_EMBEDDINGS: Embeddings = MappingProxyType({})


def stored_embeddings(directory: Path, config: Any) -> dict[str, StoredTensor]:
    """Return the base model's input embedding and output projection, without reading any values."""
    stored = stored_tensors(directory, config)
    return {match["name"]: tensor for name, tensor in stored.items() if (match := STORED_NAME.fullmatch(name))}


def check_copy(key: str, tensor: Tensor, embeddings: Embeddings) -> None:
    """Raise CheckpointInvalid unless the tensor is a copy of the base model's embedding."""
    match = EMBEDDINGS_KEY.fullmatch(key)
    # A model with tied embeddings has one weight for both.
    stored = match and (embeddings.get(match["name"]) or embeddings.get("embed_tokens"))
    if stored and tensor.shape != stored.header.shape:
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE}: {key} has shape {list(tensor.shape)}, and the base model's has "
            f"{list(stored.header.shape)}. An adapter with a resized vocabulary belongs to another base model: "
            "train it without resizing, or serve the resized model."
        )
    if not stored or not any(_equals(tensor, stored, dtype) for dtype in TYPES):
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE}: {key} differs from the base model's: the embedding was fully trained, and this server "
            "supports only LoRA. Save the adapter with `save_embedding_layers=False` if the embedding should be "
            "unchanged, or merge the adapter and serve that model."
        )


def _equals(tensor: Tensor, stored: StoredTensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor has the stored values after rounding to `dtype`."""
    starts = range(0, tensor.shape[0], ROWS_AT_ONCE)
    return all(
        torch.equal(tensor[start : start + ROWS_AT_ONCE], rows.to(dtype).to(tensor.dtype))
        for start, rows in zip(starts, _rows_of(stored, starts), strict=True)
    )


def _rows_of(stored: StoredTensor, starts: range) -> Iterator[Tensor]:
    if stored.file.suffix != ".safetensors":
        whole = pickled(stored.file)[stored.name]
        yield from (whole[start : start + starts.step] for start in starts)
        return
    with safe_open(str(stored.file), framework="pt") as opened:
        rows = opened.get_slice(stored.name)
        yield from (rows[start : start + starts.step] for start in starts)


KEY_PREFIX, KEY_SUFFIX = "base_model.model.", ".weight"
TINKER_UNEMBED = "model.unembed_tokens"
"""The output projection's name in Tinker's archives. The name in transformers is `lm_head`."""
MOST_NAME_CHARACTERS = 256
LENGTH_BYTES = 8
"""The size of the field with the header's length, at the beginning of a safetensors file."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Array = NDArray[np.float32]


def read_adapter(
    config: bytes,
    weights: bytes,
    announced: AnnouncedAdapter,
    shapes_of: ShapesOf,
    embeddings: Embeddings = NO_EMBEDDINGS,
) -> AdapterState:
    """Read an adapter. Raises CheckpointInvalid, with the file and the cause, and the UserError of `shapes_of`.

    `embeddings` are the embeddings in the base model's files; an imported file may hold copies of these embeddings.
    """
    limits = SizeLimits.of(announced, shapes_of, [tuple(stored.header.shape) for stored in embeddings.values()])
    rank, alpha = read_rank_and_alpha(config)
    if rank != announced.rank:
        raise CheckpointInvalid(f"{CONFIG_FILE} has rank {rank}, but rank {announced.rank} was announced.")
    keys = [key for key, shape in _shapes_in(weights, limits).items() if 0 not in shape]
    families = _families([_name(key) for key in keys if not EMBEDDINGS_KEY.fullmatch(key)], announced)
    flags = {f"train_{family}": family in families for family in FAMILIES}
    lora = LoraSpec(rank, alpha, announced.seed, **flags)
    shapes = shapes_of(lora)
    if len(weights) > limits.weights_bytes:
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE} has {len(weights)} bytes; the limit for rank {rank} on this base model is "
            f"{limits.weights_bytes}."
        )
    fitted = _fitted(_layouts_of_experts(_tensors(weights, embeddings), rank), shapes)
    new = _new({name: shape for name, shape in shapes.items() if name not in fitted}, announced.seed)
    tensors = {
        f"weights/{name}": np.ascontiguousarray(fitted[name] if name in fitted else new[name]) for name in shapes
    }
    return AdapterState(lora, 0, tensors)


def _new(shapes: Shapes, seed: int) -> dict[str, Array]:
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return zeros | {name: drawn.numpy() for name, drawn in adapters.draw(seed, shapes)}


def _shapes_in(content: bytes, limits: SizeLimits) -> dict[str, list[int]]:
    """Return the shapes by key. Read only the header, and copy no tensor."""
    size = int.from_bytes(content[:LENGTH_BYTES], "little")
    _check_header(content, size, limits)
    try:
        header = _header_in(content[LENGTH_BYTES : LENGTH_BYTES + size])
        return {key: list(found["shape"]) for key, found in header.items() if key != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE} is not a complete safetensors file: its header cannot be read."
        ) from None


def _header_in(content: bytes) -> Any:
    return json.loads(content)


def _check_header(content: bytes, size: int, limits: SizeLimits) -> None:
    if LENGTH_BYTES + size > len(content):
        raise CheckpointInvalid(f"{WEIGHTS_FILE} is not a complete safetensors file: its header is truncated.")
    if size > limits.header_bytes:
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE} has a header of {size} bytes; the limit on this base model is {limits.header_bytes}."
        )
    separators = sum(content.count(each, LENGTH_BYTES, LENGTH_BYTES + size) for each in (b",", b"[", b"{"))
    if separators > limits.header_separators:
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE} has a header of {separators} values; the limit on this base model is "
            f"{limits.header_separators}."
        )


def _tensors(content: bytes, embeddings: Embeddings) -> dict[str, Array]:
    """Return the tensors by `<module>.lora_A|B`, as float32."""
    try:
        loaded = load_tensors(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointInvalid(f"{WEIGHTS_FILE} is not a complete safetensors file: {error}.") from error
    found: dict[str, Array] = {}
    for key, tensor in loaded.items():
        if not tensor.numel():
            continue  # Tinker's placeholder for a projection that the model's experts lack
        if tensor.dtype not in DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointInvalid(f"{WEIGHTS_FILE}: {key} is {dtype}; supported are float32, bfloat16 and float16.")
        if not torch.isfinite(tensor).all():
            raise CheckpointInvalid(f"{WEIGHTS_FILE}: {key} holds numbers that are not finite.")
        if EMBEDDINGS_KEY.fullmatch(key):
            check_copy(key, tensor, embeddings)
        else:
            found[_name(key)] = tensor.float().numpy()
    if not found:
        raise CheckpointInvalid(f"{WEIGHTS_FILE} holds no tensor.")
    return found


def _name(key: str) -> str:
    name = key.removeprefix(KEY_PREFIX).removesuffix(KEY_SUFFIX)
    module, _, part = name.rpartition(".")
    is_factor = part in ("lora_A", "lora_B") and module and key.endswith(KEY_SUFFIX)
    if not is_factor or len(key) > MOST_NAME_CHARACTERS:
        shown = key[:MOST_NAME_CHARACTERS]
        raise CheckpointInvalid(
            f"{WEIGHTS_FILE}: {shown!r} is not a factor of a LoRA adapter (….lora_A.weight, ….lora_B.weight)."
        )
    return f"{UNEMBED_NAME if module == TINKER_UNEMBED else module}.{part}"


def _families(names: Sequence[str], announced: AnnouncedAdapter) -> set[str]:
    families: set[str] = set()
    for name in names:
        family = module_family(name.rpartition(".")[0].removesuffix(".base_layer"))
        if family is None:
            raise CheckpointInvalid(f"{WEIGHTS_FILE}: adapters on this server cannot have a part {name}.")
        if not announced.allows(family):
            raise CheckpointInvalid(f"{WEIGHTS_FILE} holds {name}, but train_{family} was announced as False.")
        families.add(family)
    return families


def _layouts_of_experts(tensors: dict[str, Array], rank: int) -> dict[str, Array]:
    try:
        return to_tinker_experts(tensors, rank)
    except ValueError as error:
        raise CheckpointInvalid(f"{WEIGHTS_FILE}: {error}.") from error


def _fitted(tensors: Mapping[str, Array], shapes: Shapes) -> dict[str, Array]:
    """Return complete pairs of factors, in the shapes that the base model needs."""
    fitting: dict[str, Array] = {}
    for stored, tensor in tensors.items():
        name = stored if stored in shapes else stored.replace(".attn.", ".self_attn.")  # Tinker's name in gpt-oss
        if name not in shapes:
            raise CheckpointInvalid(f"{WEIGHTS_FILE} holds {stored}, which this base model does not have.")
        try:
            fitting[name] = fit_shape(tensor, shapes[name])
        except NotShared:
            raise CheckpointInvalid(
                f"{WEIGHTS_FILE}: {stored} differs between experts. On this server, as in Tinker, experts share this "
                "factor: an adapter in which each has its own cannot be imported."
            ) from None
        except ValueError:
            raise CheckpointInvalid(
                f"{WEIGHTS_FILE}: {stored} has shape {list(tensor.shape)}; this base model needs {list(shapes[name])}."
            ) from None
    for name in fitting:
        module, _, part = name.rpartition(".")
        other = f"{module}.lora_{'B' if part == 'lora_A' else 'A'}"
        if other not in fitting:
            raise CheckpointInvalid(f"{WEIGHTS_FILE} holds {name} without {other}.")
    return fitting
