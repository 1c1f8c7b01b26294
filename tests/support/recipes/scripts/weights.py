"""A checkpoint to local files and back into models: weights.py MODEL STATE_PATH SAMPLER_PATH FOLDER

`weights.download` fetches and decrypts it, `build_hf_model` merges it with its base, `build_lora_adapter` makes PEFT's
adapter of it; all three continue a prompt greedily as the server does that holds the saved sampler.
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
TOKENS = 12


def main(model: str, state_path: str, sampler_path: str, folder: str) -> None:
    adapter = download(tinker_path=state_path, output_dir=f"{folder}/adapter")
    build_hf_model(base_model=model, adapter_path=adapter, output_path=f"{folder}/merged")
    build_lora_adapter(base_model=model, adapter_path=adapter, output_path=f"{folder}/peft")
    prompt = get_tokenizer(model).encode(QUESTION)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    said = {
        "merged": _continued(AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=torch.float32), prompt),
        "peft": _continued(PeftModel.from_pretrained(base, f"{folder}/peft"), prompt),
    }
    served = _sampled(sampler_path, prompt)
    apart = {f"apart from the {name} model": _differing(served, tokens) for name, tokens in said.items()}
    print(json.dumps({"tokens": len(served), **apart}))


def _sampled(sampler_path: str, prompt: list[int]) -> list[int]:
    with tinker.ServiceClient() as client:
        sampler = client.create_sampling_client(model_path=sampler_path).result()
        params = tinker.SamplingParams(temperature=0.0, max_tokens=TOKENS)
        return [*sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params).result().sequences[0].tokens]


@torch.no_grad()
def _continued(model: PreTrainedModel | PeftModel, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(TOKENS):
        likeliest = model(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, likeliest], dim=1)
    return tokens[0, len(prompt) :].tolist()


def _differing(served: list[int], continued: list[int]) -> int:
    """The server ends with the model's turn."""
    return sum(a != b for a, b in zip(served, continued, strict=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
