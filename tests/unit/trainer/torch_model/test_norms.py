"""Promises of the GPU kernel for RMS norms: it computes each RMS norm whose formula it has, and no other norm."""

from __future__ import annotations

import pytest
import torch
from tinsmith_trainer.torch_model.norms import fuse_norms
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

WIDTH = 32


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_a_fused_norm_has_the_values_and_gradients_of_transformers(
    kind: type[nn.Module], dtype: torch.dtype, rounding: float
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(kind(WIDTH, eps=1e-3)).to(dtype)
    model[0].weight.data.normal_()
    x = torch.randn((5, 3, WIDTH)).to(dtype).requires_grad_()
    upstream = torch.randn((5, 3, WIDTH)).to(dtype)
    plain = model(x)
    [plain_gradient] = torch.autograd.grad(plain, x, upstream)
    assert fuse_norms(model) == 1
    fused = model(x)
    [fused_gradient] = torch.autograd.grad(fused, x, upstream)
    for one, other in ((fused, plain), (fused_gradient, plain_gradient)):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=rounding, atol=2 * rounding)
    assert "forward" in vars(model[0])


@pytest.mark.parametrize("norm", [Gemma2RMSNorm(WIDTH), Qwen3NextRMSNormGated(WIDTH), nn.LayerNorm(WIDTH)])
def test_a_norm_of_another_formula_stays_as_it_is(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    assert fuse_norms(model) == 0
    assert "forward" not in vars(norm)
