"""A program that turns a checkpoint into local files and models: weights.py MODEL STATE_PATH SAMPLER_PATH FOLDER.

`weights.download` fetches and decrypts it, `build_hf_model` merges it with its base, `build_lora_adapter` makes PEFT's
adapter of it; both give a text's tokens the logprobs that the server gives them by the saved sampler.
"""

from __future__ import annotations

import json
import sys

import tinker
import torch
from peft import PeftModel
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.weights import build_hf_model, build_lora_adapter, download
from transformers import AutoModelForCausalLM, PreTrainedModel

QUESTION = "Ada has 3 apples and buys 4 more. How many apples are there?"


def main(model: str, state_path: str, sampler_path: str, folder: str) -> None:
    adapter = download(tinker_path=state_path, output_dir=f"{folder}/adapter")
    build_hf_model(base_model=model, adapter_path=adapter, output_path=f"{folder}/merged")
    build_lora_adapter(base_model=model, adapter_path=adapter, output_path=f"{folder}/peft")
    prompt = get_tokenizer(model).encode(QUESTION)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    untrained = _logprobs(base, prompt)
    said = {
        "base": untrained,
        "merged": _logprobs(AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=torch.float32), prompt),
        "peft": _logprobs(PeftModel.from_pretrained(base, f"{folder}/peft"), prompt),
    }
    served = _served(sampler_path, prompt)
    apart = {f"apart from the {name} model": (served - logprobs).abs().max().item() for name, logprobs in said.items()}
    print(json.dumps({"tokens": len(served), **apart}))


def _served(sampler_path: str, prompt: list[int]) -> torch.Tensor:
    """Logprobs `[tokens - 1]` of all but the first."""
    with tinker.ServiceClient() as client:
        sampler = client.create_sampling_client(model_path=sampler_path).result()
        return torch.tensor(sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt)).result()[1:])


@torch.no_grad()
def _logprobs(model: PreTrainedModel | PeftModel, prompt: list[int]) -> torch.Tensor:
    tokens = torch.tensor(prompt)
    logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0]


if __name__ == "__main__":
    main(*sys.argv[1:])
