"""One model over many ranks by Megatron, which the engines `nemo-rl` and `miles` share: in this process or as Ray
actors on CPUs, and on GPUs by what each of the two brings. Knows neither of them."""
