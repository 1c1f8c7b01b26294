"""As much of Megatron-Bridge as the stand-in of Miles needs: megatron-core beside it is the real one."""
