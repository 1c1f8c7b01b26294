"""The input that takes most memory for its size, as far as we know, for each parser of a tenant's bytes.

As a program, it parses each of them in a process of its own, and prints as JSON what that took.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import logging
import os
import resource
import sys
import traceback
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import numpy as np
import pytest
import structlog
import zstandard
from PIL import Image as PillowImage
from safetensors.numpy import save
from tinsmith_rpc import custom_losses, wire_pb2, worker_pb2, zstd_frames
from tinsmith_rpc.training_bodies import MAX_DATUMS, MAX_TAGS, TAGS_OF_A_PART, outline_of
from tinsmith_server.routes.dialects.requests import CONVERSATION
from tinsmith_server.routes.service import note_telemetry
from tinsmith_server.services.sampling.sample_requests import sample_submission
from tinsmith_server.services.training.custom_losses import custom_loss_id
from tinsmith_server.services.training.operation_bodies import gunzipped
from tinsmith_server.services.training.submit_requests import json_operation
from tinsmith_server.wire.dialects.openai import ChatCompletionRequest
from tinsmith_server.wire.head import read_head
from tinsmith_server.wire.json_bodies import GRAPH, PROMPT, read_object
from tinsmith_server.wire.json_training import training_shape
from tinsmith_trainer.checkpoints import age_files
from tinsmith_trainer.engines.base import AnnouncedAdapter, LoraSpec
from tinsmith_trainer.engines.imports.files import read_adapter
from tinsmith_trainer.engines.imports.size_limits import SizeLimits
from tinsmith_trainer.errors import CheckpointInvalid, UserError
from tinsmith_trainer.sampling.codec import decode_sample
from tinsmith_trainer.torch_model.base_model import Image
from tinsmith_trainer.torch_model.image_files import read_pixels, read_sizes
from tinsmith_trainer.wire.codec import decode_forward_backward, open_body

MIB = 2**20
Measured = tuple[int, Callable[[], object]]
"""The bytes that the sender sends, and the parser."""


def refusing(kind: type[Exception], says: str, parse: Callable[[], object]) -> Callable[[], None]:
    def parsed() -> None:
        with pytest.raises(kind, match=says):
            parse()

    return parsed


WIDE = "\U0001f600".encode()
"""One makes a text of ASCII take four bytes a character."""


def _sized(field: int, content: bytes) -> bytes:
    length = len(content)
    encoded = bytes(length >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21)) + bytes([length >> 28])
    return bytes([field << 3 | 2]) + encoded + content


def _datum(tokens: int) -> bytes:
    targets = wire_pb2.Tensor(dense=bytes(8 * tokens), dtype=wire_pb2.INT64, shape=[tokens])
    text = wire_pb2.Chunk(encoded_text=wire_pb2.EncodedTextChunk(tokens=bytes(4 * tokens)))
    return wire_pb2.Datum(model_input=[text], loss_fn_inputs={"target_tokens": targets}).SerializeToString()


def _training(datums: int, tokens: int) -> bytes:
    return (b"\x1a" + _varint(len(_datum(tokens))) + _datum(tokens)) * datums


def _varint(number: int) -> bytes:
    encoded = b""
    while number > 0x7F:
        encoded, number = encoded + bytes([number & 0x7F | 0x80]), number >> 7
    return encoded + bytes([number])


def _decoded(body: bytes) -> Measured:
    return len(body), lambda: decode_forward_backward(open_body(body, zstd=False))


OF_MANY_KINDS = _sized(1, b"\x0a\0\x12\0" * (TAGS_OF_A_PART // 4 - 1)) * (MAX_TAGS // TAGS_OF_A_PART)
"""Chunks that are a text, an image, a text, …: as many fields as their number allows."""


def head() -> Measured:
    """Return a frame whose reader keeps the longest history that readers keep."""
    body = b"\x0a\x09s:train:0\x10\x01" + _sized(3, bytes(48 * MIB))
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=26)
    frame = zstandard.ZstdCompressor(compression_params=settings).compress(body)
    return len(body), lambda: read_head(frame, "zstd")


def outline() -> Measured:
    body = _sized(3, OF_MANY_KINDS)
    return len(body), lambda: outline_of(body)


def training_of_long_datums() -> Measured:
    return _decoded(_training(16, 50_000))


def training_of_short_datums() -> Measured:
    return _decoded(_training(MAX_DATUMS, 1))


def training_of_kinds() -> Measured:
    return _decoded(_sized(3, OF_MANY_KINDS + _sized(1, b"\x0a\6\x0a\4\0\0\0\0")))


def sparse_tensor() -> Measured:
    datum = wire_pb2.Datum.FromString(_datum(1))
    weights = datum.loss_fn_inputs["weights"]
    weights.dtype, weights.shape[:] = wire_pb2.INT32, [1, 4 * MIB]
    weights.sparse_csr.crow_indices = bytes(16)
    content = datum.SerializeToString()
    return 32 * MIB, _decoded(b"\x1a" + _varint(len(content)) + content)[1]


def zstd() -> Measured:
    compressor = zstandard.ZstdCompressor().compressobj()
    frame = compressor.compress(bytes(16 * MIB)) + compressor.flush()
    return 16 * MIB, lambda: zstd_frames.unpack(frame, zstd_frames.unpacked_bytes(frame, 16 * MIB))


def gunzip() -> Measured:
    content = gzip.compress(bytes(16 * MIB))
    return 16 * MIB, lambda: gunzipped(content, 16 * MIB)


def json_training() -> Measured:
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [0] * 250_000}]},
        "loss_fn_inputs": {"target_tokens": {"data": [0] * 250_000, "dtype": "int64"}},
    }
    call = {"data": [datum] * 2, "loss_fn": "cross_entropy"}
    content = {"model_id": "s:train:0", "seq_id": 1, "forward_backward_input": call}
    body = json.dumps(content, separators=(",", ":")).encode()
    return len(body), lambda: json_operation(
        read_object(body, training_shape(64 * MIB)), "forward_backward_input", 64 * MIB
    )


def json_object() -> Measured:
    body = b'{"a":"' + WIDE + b"a" * 4 * MIB + b'","b":[' + b"{}," * 1000 + b"0]}"
    return len(body), lambda: read_object(body)


def sample() -> Measured:
    chunk = b'{"type":"encoded_text","tokens":[' + b"0," * MIB + b"0]}"
    body = b'{"sampling_session_id":"s:sample:0","seq_id":1,"prompt":{"chunks":[' + chunk + b"]}}"
    return len(body), lambda: sample_submission(read_object(body, PROMPT))


def conversation() -> Measured:
    message = b'{"role":"user","content":"' + WIDE + b"a" * 48 * 1024 + b'"}'
    body = b'{"model":"m","messages":[' + b",".join([message] * 10) + b"]}"
    return len(body), lambda: ChatCompletionRequest.model_validate(read_object(body, CONVERSATION))


def telemetry() -> Measured:
    body = b'{"events":[' + b'{"":0},' * 8000 + b'{"":"' + WIDE + b"a" * 900_000 + b'"}]}'
    return len(body), lambda: note_telemetry(body)


def _graph() -> dict[str, Any]:
    nodes: list[dict[str, Any]] = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
    for number in range(400):
        args = [{"ref": "logprobs"}, *[{"tuple": []}] * 8]
        nodes.append({"op": "call_method", "name": f"n{number}", "target": "sum", "args": args})
    nodes.append({"op": "output", "name": "output", "target": "output", "args": [[{"ref": "n0"}, {"dict": {}}]]})
    return {"name": "loss", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": nodes}}


def custom_loss() -> Measured:
    body = json.dumps({"session_id": "s", "custom_loss_seq_id": 1, **_graph()}).encode()

    return len(body), lambda: custom_loss_id(read_object(body, GRAPH))


def loss_id() -> Measured:
    text = b"[" + b"[]," * (custom_losses.MAX_JSON_BYTES // 3 - 2) + b"[]]"
    packed = "loss1-" + urlsafe_b64encode(zlib.compress(text, 9)).decode()

    return len(packed), refusing(custom_losses.CustomLossInvalid, "damaged", lambda: custom_losses.loss_of(packed))


def token() -> Measured:
    claims = {"sub": "k", "pad": ["" for _ in range(7000)]}
    text = jwt.encode(claims, "a secret of thirty-two characters", "HS256")
    return len(text), lambda: jwt.decode(text, "a secret of thirty-two characters", algorithms=["HS256"])


def image() -> Measured:
    file = io.BytesIO()
    PillowImage.new("RGB", (4096, 4096)).save(file, "png")
    one = Image(0, file.getvalue(), "png")
    return len(file.getvalue()), lambda: (read_sizes("it", [one]), read_pixels("it", one))


def _shapes(lora: LoraSpec) -> dict[str, tuple[int, ...]]:
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(128)] if lora.train_attn else []
    factors = {"lora_A": (lora.rank, 1024), "lora_B": (1024, lora.rank)}
    return {f"{module}.{name}": shape for module in modules for name, shape in factors.items()}


ANNOUNCED = AnnouncedAdapter(8, 0)
CONFIG = json.dumps({"r": 8, "lora_alpha": 8}).encode()


def adapter_files() -> Measured:
    shapes = _shapes(LoraSpec(8, 8.0, 0))
    weights = save({f"base_model.model.{name}.weight": np.ones(shape, np.float16) for name, shape in shapes.items()})
    return len(weights), lambda: read_adapter(CONFIG, weights, ANNOUNCED, _shapes)


def adapter_header() -> Measured:
    limits = SizeLimits.of(ANNOUNCED, _shapes)
    entries = b",".join(b'"%d":[]' % number for number in range(limits.header_separators // 2 - 8))
    pad = b"a" * (limits.header_bytes - len(entries) - 64)
    header = b"{" + entries + b',"":"' + WIDE + pad + b'"}'
    return len(header), refusing(
        CheckpointInvalid,
        "header cannot be read",
        lambda: read_adapter(CONFIG, len(header).to_bytes(8, "little") + header, ANNOUNCED, _shapes),
    )


def adapter_config() -> Measured:
    config = b'{"r":[' + b"[]," * 340_000 + b"0]}"
    return len(config), refusing(
        CheckpointInvalid, "not PEFT's configuration for LoRA", lambda: read_adapter(config, b"", ANNOUNCED, _shapes)
    )


def sample_request() -> Measured:
    targets = wire_pb2.Tensor(dtype=wire_pb2.INT32, shape=[1, 4 * MIB])
    targets.sparse_csr.crow_indices = bytes(16)
    request = worker_pb2.SampleRequest(prompt_tokens=bytes(8), target_prompt_logprobs=targets)
    content = request.SerializeToString()
    return 32 * MIB, lambda: decode_sample(worker_pb2.SampleRequest.FromString(content))


def recipients() -> Measured:
    names = ["age1" + "q" * 58] * 2000

    return sum(map(len, names)), refusing(UserError, "recipient", lambda: age_files.encrypt({"a": [b"b"]}, names))


def _tell(parse: Callable[[], object], writing: int) -> None:
    """Report from the child, which ends here."""
    try:
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        parse()
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        os.write(writing, str(highest - before).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


INPUTS: dict[str, Callable[[], Measured]] = {
    function.__name__: function
    for function in (
        *(head, outline, zstd, gunzip, json_training, json_object, sample, conversation, telemetry, custom_loss, token),
        *(training_of_long_datums, training_of_short_datums, training_of_kinds, sparse_tensor, loss_id, image),
        *(adapter_files, adapter_header, adapter_config, sample_request, recipients),
    )
}


def measured(make: Callable[[], Measured]) -> tuple[int, int]:
    """Bytes sent, and bytes of memory that parsing them took at its height, in a child whose memory is its own."""
    size, parse = make()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _tell(parse, writing)
    os.close(writing)
    with os.fdopen(reading) as told:
        answer = told.read()
    assert os.waitpid(child, 0)[1] == 0, make.__name__
    return size, int(answer)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))  # as a server does
    # As a server does, too: a collection would write to the pages of all imported objects, which the child then owns.
    gc.freeze()
    json.dump({name: measured(make) for name, make in INPUTS.items()}, sys.stdout)
