"""The operations that a custom loss may call, by torch.fx's names. No other name is resolved.

Three groups of operations are excluded. Operations that draw random numbers or work in place are excluded because a
replay must give the same bits. Operations that leave torch or read files are excluded, and so are sums by index,
because their order varies between runs. Some functions have two names, because torch has moved them.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BOTH = _words("""
abs absolute neg negative sign sgn square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2
sigmoid logit tanh sinh cosh sin cos tan asin acos atan atan2 erf erfc xlogy hypot lerp relu
floor ceil round trunc frac nan_to_num
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow
clamp clip clamp_min clamp_max minimum maximum fmin fmax
eq ne lt le gt ge isclose isnan isinf isfinite logical_and logical_or logical_not logical_xor
bitwise_and bitwise_or bitwise_not bitwise_xor
sum mean prod var std norm logsumexp softmax log_softmax cumsum cumprod logcumsumexp cummax cummin
amax amin max min argmax argmin all any count_nonzero nansum nanmean median sort argsort topk
dot mv mm bmm matmul inner outer
reshape flatten unflatten squeeze unsqueeze transpose swapaxes movedim permute t ravel
flip roll narrow select unbind chunk split tensor_split diff diagonal diag tril triu tile
gather index_select masked_select masked_fill where detach clone numel
""")

_FUNCTIONS_ALONE = _words("""
cat concat stack hstack vstack zeros ones full arange zeros_like ones_like full_like broadcast_to
where logical_and std_mean var_mean cosine_similarity
""")

_METHODS_ALONE = _words("""
float double half bfloat16 long int bool to type_as cpu contiguous size dim view view_as reshape_as
expand expand_as repeat new_zeros new_ones new_full
""")

_OF_FUNCTIONAL = _words("""
relu relu6 elu selu celu silu mish leaky_relu hardtanh softsign softmin tanh sigmoid softmax log_softmax normalize
mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits nll_loss cross_entropy pad
softplus logsigmoid gelu
""")

_OPERATORS = _words("""
add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert getitem matmul
""")

_MATH = _words("sqrt exp log log2 log10 log1p expm1 pow fabs floor ceil tanh")

OPERATORS = frozenset(f"operator.{name}" for name in _OPERATORS)
MATH = frozenset(f"math.{name}" for name in _MATH)

FUNCTIONS = (
    frozenset(f"torch.{name}" for name in (*_BOTH, *_FUNCTIONS_ALONE))
    | frozenset(f"torch.nn.functional.{name}" for name in _OF_FUNCTIONAL)
    | frozenset({"torch.functional.norm", "torch.functional.split"})
    | frozenset({"torch._C._nn.softplus", "torch._C._nn.log_sigmoid", "torch._C._nn.gelu"})
    | frozenset({"torch._C._special.special_expit", "torch._C._special.special_xlogy", "getattr"})
    | OPERATORS
    | MATH
)
METHODS = frozenset((*_BOTH, *_METHODS_ALONE))
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT", "values", "indices"})
"""The attributes that `getattr` may read."""

FORBIDDEN_KEYWORDS = frozenset({"out", "inplace", "generator", "pin_memory", "requires_grad"})
