"""The program `python -m …bridge_import DIRECTORY FOLDER`.

The program runs once, without a GPU, with the ranks' Python.

The program imports a model in the same way as `AutoBridge.import_ckpt`, and saves the same files as NeMo RL's
`import_model_from_hf_name`. So ranks find a finished checkpoint, and need not convert the model themselves. A Megatron
checkpoint does not depend on the layout of the ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tinsmith_trainer.engines.nemo_rl.conversion import FAILURE

STANDARD_INPUT = 0


def main(arguments: Sequence[str]) -> int:
    directory, folder = (Path(argument) for argument in arguments)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import_into(directory, folder)
    except Exception as error:
        traceback.print_exc()
        (folder / FAILURE).write_text(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _end_with_parent() -> None:
    """End the process when the parent process ends.

    When the parent ends, the kernel closes a pipe to which the parent never writes.
    """
    os.read(STANDARD_INPUT, 1)  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
    os._exit(1)


def import_into(directory: Path, folder: Path) -> None:
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    bridge = AutoBridge.from_hf_pretrained(str(directory), trust_remote_code=False)
    with temporary_distributed_context(backend="gloo"):
        provider = bridge.to_megatron_provider(load_weights=True)
        provider.gradient_accumulation_fusion = False  # it needs kernels, and nothing is computed here
        provider.finalize()
        model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        # It is saved with the model, and ranks would build their model in host memory.
        model[0].config.use_cpu_initialization = False
        with _saving_without_gpu():
            bridge.save_megatron_model(model, str(folder))


@contextmanager
def _saving_without_gpu() -> Iterator[None]:
    """Inside the context, answer Megatron's queries about a GPU, so that a model can be saved without a GPU.

    The answers have no effect on the saved model.

    Megatron asks for the random state, which is not saved (`get_rng_state` of Megatron-Bridge's `checkpointing.py`),
    and for the end of copies to the host (`preload_tensors` of Megatron-core's `filesystem_async.py`). Megatron also
    asks for the device on which it reports failures to other ranks (`save_state_dict_async_finalize` of Megatron-core's
    `state_dict_saver.py`). With gloo, this device is the host.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    answers = {
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),
        "synchronize": lambda device=None: None,
        "current_device": lambda: "cpu",
    }
    originals = {name: getattr(torch.cuda, name) for name in answers}
    vars(torch.cuda).update(answers)
    try:
        yield
    finally:
        vars(torch.cuda).update(originals)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
