"""What the real NeMo RL, Megatron-Bridge and Megatron need changed to run where there is no GPU, each with its reason.

Nothing of Tinsmith's is changed, and nothing of the calculation: tensors that are meant for a GPU are on the CPU, gloo
stands for NCCL, Megatron's own layers for TransformerEngine's, and questions that only a driver could answer are
answered. A change is made when its module was imported, in whatever process that is.
"""

from __future__ import annotations

from nemo_rl_on_cpu.after_import import install_hooks


def install() -> None:
    """Before anything is imported that is changed. Each hook imports what it needs when it runs."""
    install_hooks(
        after={
            "torch": _torch,
            "megatron.core.tensor_parallel.random": _random_states,
            "megatron.core.transformer.transformer_config": _kernels,
            "megatron.core.transformer.torch_norm": _norms,
            "megatron.core.transformer.dot_product_attention": _attention,
            "megatron.core.transformer.moe.token_dispatcher": _tokens,
            "megatron.core.models.backends": _experts,
            "megatron.bridge.models.gpt_provider": _layers,
            "megatron.bridge.peft.utils": _adapters,
            "megatron.bridge.training.initialize": _initialize,
        },
        around={"megatron.bridge.peft.lora_layers": _transformer_engine},
    )


def _torch() -> None:
    from nemo_rl_on_cpu import cuda

    cuda.answer_for_cpu()


def _random_states() -> None:
    from nemo_rl_on_cpu import megatron

    megatron.draw_without_gpu()


def _kernels() -> None:
    from nemo_rl_on_cpu import megatron

    megatron.use_no_kernels()


def _norms() -> None:
    from nemo_rl_on_cpu import megatron

    megatron.norm_parts_of_sequences()


def _attention() -> None:
    from nemo_rl_on_cpu import context

    context.attend_over_context_ranks()


def _tokens() -> None:
    from nemo_rl_on_cpu import megatron

    megatron.send_tokens_without_gpu()


def _experts() -> None:
    from nemo_rl_on_cpu import experts

    experts.group_experts()


def _layers() -> None:
    from nemo_rl_on_cpu import bridge

    bridge.build_local_layers()


def _adapters() -> None:
    from nemo_rl_on_cpu import bridge

    bridge.adapt_local_layers()


def _initialize() -> None:
    from nemo_rl_on_cpu import bridge

    bridge.initialize_without_gpu()


def _transformer_engine():  # type: ignore[no-untyped-def]
    from nemo_rl_on_cpu import bridge

    return bridge.transformer_engine_by_name()
