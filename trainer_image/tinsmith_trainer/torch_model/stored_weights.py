"""The check of a model directory before the load.

The files must belong to one model, and have exactly the weights of the model's architecture.

If a checkpoint lacks tensors, transformers fills these tensors with random values and only logs a warning. So the
headers are first loaded as tensors without memory, and this module evaluates transformers' report. After the check, the
loaders read the same files.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.architecture import (
    architecture_of,
    loaded_config,
    loads_text_alone,
    outside_of_text,
    skeleton,
)
from tinsmith_trainer.torch_model.quantization import dequantizing, stored_format
from tinsmith_trainer.torch_model.weight_files import (
    StoredTensor,
    have_equal_values,
    listed,
    lost_tensors,
    stored_tensors,
)

log = structlog.get_logger(__name__)

Stored = Mapping[str, StoredTensor]
Lost = Mapping[str, tuple[str, str]]
"""The names of the shard and of the index, for each tensor that the index lists but the shard lacks."""

EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<part>.+)")
PREDICTION = re.compile(r"(^|\.)mtp(\.|_)")
"""The names of layers that predict further tokens.

No engine of Tinsmith runs these layers. In most model families, transformers ignores these layers.
"""
UNUSED = re.compile(r"(^|\.)((cos|sin)_cached|inv_freq|[kv]_scale|input_scale)$")
"""Tensors that no model uses: tables of rotary positions, scales of a KV cache, and scales of FP8 activations."""
LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


@dataclass(slots=True)
class Differences:
    """Differences between the files and the architecture, by tensor name.

    `shapes` holds the stored and the expected shape of each tensor that differs in shape.
    """

    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    shapes: dict[str, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)

    def sentences(self) -> Iterator[str]:
        if self.missing:
            yield f"{len(self.missing)} missing ({listed(sorted(self.missing))})"
        if self.unexpected:
            yield f"{len(self.unexpected)} that it does not have ({listed(sorted(self.unexpected))})"
        if self.shapes:
            shapes = [f"{name}: {list(has)}, not {list(due)}" for name, (has, due) in sorted(self.shapes.items())]
            yield f"{len(shapes)} of another shape ({listed(shapes)})"


def check_stored_weights(directory: Path, config: Any) -> None:
    """Refuse files that do not hold exactly the architecture's weights.

    Raises ModelDirectoryInvalid with the names of the tensors.

    If the configuration belongs to no causal language model, this check passes, and the loader later refuses the model.
    """
    architecture = architecture_of(config)
    if architecture is None:
        return
    stored = stored_tensors(directory, config)
    lost = {name: where for name, where in lost_tensors(directory, stored).items() if not UNUSED.search(name)}
    found = _of_experts(stored, alike=False)
    found.missing |= _missing_counterparts(stored, stored_format(config))
    _refuse(directory, architecture, found, lost)
    copies = _tied_copies(directory, config, stored)
    once = {name: tensor for name, tensor in stored.items() if name not in copies}
    _refuse(directory, architecture, _reported(architecture, directory, config, once, lost), lost)


def _refuse(directory: Path, architecture: Any, found: Differences, lost: Lost) -> None:
    """Raise ModelDirectoryInvalid if files and architecture differ."""
    if differences := list(found.sentences()):
        explained = _losses(lost, found.missing) if found.missing or found.shapes else ""
        removable = " A tensor that the model was trained without can be removed from its file."
        raise ModelDirectoryInvalid(
            f"The weights in {directory} are not those of the {architecture.__name__} that config.json describes. "
            f"Tensors: {'; '.join(differences)}.{explained} Copy the model's files again, or correct config.json."
            f"{removable if found.unexpected else ''}"
        )


def _losses(lost: Lost, missing: Collection[str] = ()) -> str:
    """Describe which shards lack which tensors: only `missing` tensors, or all if none of them is `missing`."""
    by_shard: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in lost.keys() & missing or lost:
        by_shard[lost[name]].append(name)
    return "".join(
        f" {shard} lacks tensors that {index} lists for it: {listed(sorted(names))}."
        for (shard, index), names in sorted(by_shard.items())
    )


def _of_experts(stored: Stored, *, alike: bool) -> Differences:
    """Find gaps in the numbering of experts, and experts that differ in shape from most experts.

    Experts are stacked by number, so a gap would shift every later expert. If `alike`, every projection must have the
    same number of experts. In LongCat, experts without computation lack some projections.
    """
    layers: dict[str, dict[str, dict[int, Sequence[int]]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in stored.items():
        if match := EXPERT.fullmatch(name):
            layers[match["layer"]][match["part"]][int(match["number"])] = tuple(tensor.header.shape)
    found = Differences()
    for layer, parts in layers.items():
        most = 1 + max(number for shapes in parts.values() for number in shapes)
        for part, shapes in parts.items():
            count = most if alike else 1 + max(shapes)
            found.missing |= {f"{layer}.{number}.{part}" for number in range(count) if number not in shapes}
            usual = max(shapes.values(), key=list(shapes.values()).count)
            found.shapes |= {
                f"{layer}.{number}.{part}": (shape, usual) for number, shape in shapes.items() if shape != usual
            }
    return found


def _missing_counterparts(stored: Stored, stored_as: str) -> set[str]:
    """Find the missing halves of quantized weights. transformers treats FP8 weights without scales as dense weights."""
    if stored_as == "fp8":
        coded = [name for name, tensor in stored.items() if tensor.header.dtype in FLOAT8]
        return {f"{name}_scale_inv" for name in coded if not stored.keys() & {f"{name}_scale_inv", f"{name}_scale"}}
    missing: set[str] = set()
    for one, other in (("_blocks", "_scales"), ("_scales", "_blocks")) if stored_as == "mxfp4" else ():
        missing |= {name.removesuffix(one) + other for name in stored if name.endswith(one)} - stored.keys()
    return missing


def _reported(architecture: Any, directory: Path, config: Any, stored: Stored, lost: Lost) -> Differences:
    """Return what transformers reports. transformers renames, fuses and dequantizes tensors without memory."""
    disable_progress_bar()
    options = dequantizing(directory, config)
    logged: list[str] = []
    try:
        with _captured_log(logged):
            _, report = architecture.from_pretrained(
                None,
                config=loaded_config(config),
                dtype=torch.float32,
                state_dict={name: tensor.header for name, tensor in stored.items()},
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # transformers raises RuntimeError, ValueError, KeyError, …
        log.warning("transformers cannot load the weights", directory=str(directory), report="\n".join(logged))
        _refuse(directory, architecture, _of_experts(stored, alike=True), lost)
        raise ModelDirectoryInvalid(
            f"The weights in {directory} cannot be those of the {architecture.__name__} that config.json describes: "
            f"{type(error).__name__}: {error}{_losses(lost)}"
        ) from error
    shapes = {name: (has, due) for name, has, due in report["mismatched_keys"]}
    unexpected = {
        name for name in report["unexpected_keys"] if not (UNUSED.search(name) or _only_predicts(name, config))
    }
    if unexpected and loads_text_alone(config):
        with _blaming(directory):
            outside = outside_of_text(config)
        unexpected = {name for name in unexpected if outside.isdisjoint(name.split(".")[:2])}
    return Differences(set(report["missing_keys"]), unexpected, shapes)


@contextmanager
def _captured_log(messages: list[str]) -> Iterator[None]:
    """Capture transformers' table of differences, which is not logged, because the error already names the tensors."""

    def kept(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(kept)
    try:
        yield
    finally:
        logger.removeFilter(kept)


def _only_predicts(name: str, config: Any) -> bool:
    """Return whether a tensor belongs to a layer that only predicts further tokens, by name or layer number."""
    text = config.get_text_config()
    declared = getattr(text, "num_nextn_predict_layers", None) or 0
    match = LAYER.search(name)
    beyond = match is not None and int(match[2]) - text.num_hidden_layers in range(declared)
    return beyond or PREDICTION.search(name) is not None


def _tied_copies(directory: Path, config: Any, stored: Stored) -> set[str]:
    """Return the names of stored tensors that are copies of a tied tensor.

    Raises ModelDirectoryInvalid if config.json ties two tensors with different stored values. transformers would use
    both values, while Megatron and vLLM would use one value twice.
    """
    copies: set[str] = set()
    with _blaming(directory):
        model = skeleton(config)
    computed = {name: tensor for name, tensor in stored.items() if not _only_predicts(name, config)}
    for tied, source in model.all_tied_weights_keys.items():
        if (other := _name_in(computed, source)) is None:
            continue
        left = {name: tensor for name, tensor in computed.items() if name != other}
        # A file may hold the head under two names, lm_head and language_model.lm_head, that transformers reads as one.
        while (one := _name_in(left, tied)) is not None:
            if not have_equal_values(left.pop(one), stored[other]):
                raise ModelDirectoryInvalid(
                    f"config.json in {directory} ties {one} to {other} (tie_word_embeddings), and the files hold "
                    "different values for them. Set tie_word_embeddings to false in config.json, or remove the tensor "
                    "that the model was not trained with."
                )
            copies.add(one)
    return copies


@contextmanager
def _blaming(directory: Path) -> Iterator[None]:
    """Convert an error of transformers to an error about the directory's configuration."""
    try:
        yield
    except Exception as error:  # transformers raises ValueError, KeyError, TypeError, …
        raise ModelDirectoryInvalid(
            f"transformers cannot make a model of {directory / 'config.json'}: {type(error).__name__}: {error}"
        ) from error


def _name_in(stored: Stored, parameter: str) -> str | None:
    """Find a parameter by the last part of the module's name, if transformers and the files use different prefixes."""
    if parameter in stored:
        return parameter
    ending = ".".join(parameter.split(".")[-2:])
    candidates = [name for name in stored if f".{name}".endswith(f".{ending}")]
    return candidates[0] if len(candidates) == 1 else None


ADAPTER_CONFIG = "adapter_config.json"


def checked_config(directory: Path) -> Any:
    """Return a directory's configuration, after checking that the files hold exactly the weights of the configuration.

    Raises ModelDirectoryInvalid with the name of the file or of the tensors.
    """
    check_files(directory)
    try:
        config: Any = AutoConfig.from_pretrained(directory)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, …
        raise ModelDirectoryInvalid(blame(directory, error)) from error
    check_stored_weights(directory, config)
    return config


def check_files(directory: Path) -> None:
    """Refuse a directory with files that do not belong to one model. Raises ModelDirectoryInvalid."""
    _check_no_adapter(directory)
    config = directory / "config.json"
    if not config.is_file():
        raise ModelDirectoryInvalid(f"{config} is missing: {directory} is not a transformers model directory.")
    try:
        json.loads(config.read_text())
    except ValueError as error:
        raise ModelDirectoryInvalid(f"{config} is not valid JSON: {error}.") from error
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        raise ModelDirectoryInvalid(f"{directory} has no weights: expected *.safetensors next to config.json.")
    for shard in sorted(directory.glob("*.safetensors")):
        _check_safetensors(shard)


def _check_no_adapter(directory: Path) -> None:
    """Refuse a directory with an adapter, because transformers would add the adapter to every loaded model."""
    if (directory / ADAPTER_CONFIG).is_file():
        raise ModelDirectoryInvalid(
            f"{directory} holds a PEFT adapter ({ADAPTER_CONFIG}), which transformers would silently add to the "
            f"model. To serve the base model, use a directory without the adapter's files. To train the adapter "
            f"further, move its files to another directory and import that with `tinsmith import`."
        )


def _check_safetensors(shard: Path) -> None:
    try:
        with safe_open(str(shard), framework="pt"):
            pass
    except SafetensorError as error:
        raise ModelDirectoryInvalid(f"{shard} is truncated or not a safetensors file: {error}.") from error


def blame(directory: Path, error: Exception) -> str:
    """Return the message for a directory that transformers cannot load."""
    return f"The model in {directory} cannot be loaded: {type(error).__name__}: {error}"
