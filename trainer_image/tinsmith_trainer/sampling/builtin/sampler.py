"""The built-in sampler for the worker: a thread-safe interface to the sampling loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from typing_extensions import override

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import OutOfMemory, SamplerClosed
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, Sampler, SamplerStats
from tinsmith_trainer.sampling.builtin.adapters import BASE_MODEL, LoadedAdapter, load_adapter
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.intake import Intake, Submission
from tinsmith_trainer.sampling.builtin.loop import SamplingLoop
from tinsmith_trainer.sampling.builtin.model_cache.choice import SamplerForward, choose_forward
from tinsmith_trainer.sampling.builtin.settings import BuiltinSamplerSettings
from tinsmith_trainer.sampling.constraints.grammars import Grammars
from tinsmith_trainer.sampling.model_language import ModelLanguage
from tinsmith_trainer.torch_model.device import DTYPES, end_if_device_is_lost
from tinsmith_trainer.torch_model.loading import TorchModel


class BuiltinSampler(Sampler):
    """A sampler of a torch model.

    The sampler shares the model's weights and the device with an engine in the same process, and takes turns with it.
    `forward` is the result of an earlier call of `choose_forward`, or None. The constructor raises ServerError if the
    architecture is not supported.
    """

    def __init__(
        self,
        torch_model: TorchModel,
        settings: BuiltinSamplerSettings | None = None,
        forward: SamplerForward | None = None,
    ) -> None:
        self._torch_model = torch_model
        torch_model.shared_device.prepare_sampling()
        self._language = ModelLanguage(
            torch_model.tokenizer,
            torch_model.eos_token_ids,
            torch_model.directory,
            torch_model.info.max_sequence_length,
        )
        self._grammars = Grammars(self._language, torch_model.info.vocab_size)
        self._intake = Intake()
        chosen = choose_forward(torch_model) if forward is None else forward
        self._memory = chosen.memory
        # Prompts with images need their own positions, which this sampler does not pass to transformers' caches.
        self._takes_images = torch_model.vision is not None and isinstance(chosen, ForwardPass)
        settings = settings or BuiltinSamplerSettings()
        self._adapter_dtype = DTYPES[settings.adapter_dtype]
        self._loop = SamplingLoop(torch_model, chosen, settings, self._intake)
        self._adapters_guard = threading.Lock()
        self._adapters: dict[str, LoadedAdapter] = {"": BASE_MODEL}
        self._thread = threading.Thread(target=self._run, name="builtin-sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._torch_model.shared_device.sampling():
            self._loop.run()

    @property
    @override
    def takes_images(self) -> bool:
        return self._takes_images

    @property
    @override
    def language(self) -> ModelLanguage:
        return self._language

    @override
    def load_adapter(self, adapter_key: str, state: AdapterState) -> None:
        """Load an adapter. Raises OutOfMemory, and ServerError if the weights do not fit the base model."""
        if self.has_adapter(adapter_key):
            return
        try:
            with self._torch_model.shared_device.sampling():
                layers, device = self._torch_model.layers, self._torch_model.device
                adapter = load_adapter(adapter_key, state, layers, device, self._adapter_dtype)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"There is no memory for another adapter: {error}") from error
        except Exception as error:
            end_if_device_is_lost(error)
            raise
        with self._adapters_guard:
            self._adapters.setdefault(adapter_key, adapter)

    @override
    def has_adapter(self, adapter_key: str) -> bool:
        with self._adapters_guard:
            return adapter_key in self._adapters

    @override
    def drop_adapter(self, adapter_key: str) -> None:
        """Drop an adapter. Jobs that were submitted earlier keep this version. Unknown keys are ignored."""
        with self._adapters_guard:
            adapter = self._adapters.pop(adapter_key, None) if adapter_key else None
        if adapter is not None:
            self._intake.drop(adapter)

    @override
    def prepared(self, job: SampleJob) -> SampleJob:
        constraint = job.params.constraint
        return job if constraint is None else replace(job, grammar=self._grammars.compiled(constraint))

    @override
    def submit(self, job: SampleJob, done: Callable[[SampleOutcome], None]) -> None:
        """Submit a job. After `close`, the call of `done` happens immediately in the caller's thread."""
        with self._adapters_guard:
            adapter = self._adapters.get(job.adapter_key)
        if not self._intake.submit(Submission(job, adapter, done)):
            done(SampleOutcome(error=SamplerClosed("The sampler is closed; send the request again.")))

    @override
    def cancel(self, request_id: str) -> None:
        self._intake.cancel(request_id)

    @override
    def stats(self) -> SamplerStats:
        """Return the current numbers of active and waiting jobs, and the tokens and seconds since the start."""
        return self._loop.stats()

    @override
    def sequence_memory(self) -> str:
        return self._memory

    @override
    def close(self) -> None:
        self._intake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
