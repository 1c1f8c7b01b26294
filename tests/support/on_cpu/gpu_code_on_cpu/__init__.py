"""The changes that Megatron, Megatron-Bridge and their users need where there is no GPU, each with its reason.

Nothing of Tinsmith's is changed, and nothing of the calculation: tensors that are meant for a GPU are on the CPU, gloo
stands for NCCL, Megatron's own layers for TransformerEngine's, and questions that only a driver could answer are
answered. A change is made when its module is imported, in any process.
"""

from __future__ import annotations

from gpu_code_on_cpu.after_import import After, Around, install_hooks


def install(*, after: After, around: Around) -> None:
    """Install the hooks of all backends and of this one, before the modules are imported.

    Each hook imports what it needs when it runs.
    """
    install_hooks(
        after={
            "torch": _torch,
            "megatron.core.tensor_parallel.random": _random_states,
            "megatron.core.transformer.transformer_config": _kernels,
            "megatron.core.transformer.torch_norm": _norms,
            "megatron.core.transformer.moe.token_dispatcher": _tokens,
            "megatron.bridge.models.gpt_provider": _layers,
            "megatron.bridge.peft.utils": _adapters,
            **after,
        },
        around={"megatron.bridge.peft.lora_layers": transformer_engine, **around},
    )


def _torch() -> None:
    from gpu_code_on_cpu import cuda

    cuda.answer_for_cpu()


def _random_states() -> None:
    from gpu_code_on_cpu import megatron

    megatron.draw_without_gpu()


def _kernels() -> None:
    from gpu_code_on_cpu import megatron

    megatron.use_no_kernels()


def _norms() -> None:
    from gpu_code_on_cpu import megatron

    megatron.norm_parts_of_sequences()


def _tokens() -> None:
    from gpu_code_on_cpu import megatron

    megatron.send_tokens_without_gpu()


def _layers() -> None:
    from gpu_code_on_cpu import bridge

    bridge.build_local_layers()


def _adapters() -> None:
    from gpu_code_on_cpu import bridge

    bridge.adapt_local_layers()


def transformer_engine():  # type: ignore[no-untyped-def]
    from gpu_code_on_cpu import bridge

    return bridge.transformer_engine_by_name()
