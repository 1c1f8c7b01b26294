"""What is taken for granted of the real servers, and where that is written.

The stand-ins keep to it, and so do the tests on a GPU, which ask the real ones. Nothing of it was seen on a GPU here.
Versions are those of trainer_image/versions.toml.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VLLM_DOCUMENTS = "https://docs.vllm.ai/en/v0.26.0"
VLLM_PROTOCOL = f"{VLLM_DOCUMENTS}/api/vllm/entrypoints/openai/completion/protocol/"
VLLM_ARGUMENTS = f"{VLLM_DOCUMENTS}/configuration/engine_args/"
VLLM_LORA = f"{VLLM_DOCUMENTS}/features/lora/"
VLLM_SOURCE = "vllm-project/vllm"
SGLANG_SAMPLING = "https://docs.sglang.io/basic_usage/sampling_params.html"
SGLANG_DETERMINISM = "https://docs.sglang.io/advanced_features/deterministic_inference.html"
SGLANG_SOURCE = "sgl-project/sglang"
SGLANG_LORA = f"{SGLANG_SOURCE}: docs/advanced_features/lora.ipynb"

Ground = Literal["documented", "read in the source", "general knowledge"]


@dataclass(frozen=True)
class Assumption:
    server: Literal["vllm", "sglang"]
    what: str
    ground: Ground
    where: str


ASSUMPTIONS = (
    Assumption(
        "vllm",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True opens POST /v1/load_lora_adapter {lora_name, lora_path}, which answers "
        "200 with a text once the adapter can be named, and POST /v1/unload_lora_adapter {lora_name}",
        "documented",
        VLLM_LORA,
    ),
    Assumption(
        "vllm",
        "an adapter whose name is known is answered with 400, one whose folder is missing with 404, and one that the "
        "engine refuses with 500, as is a failure of the engine's; all in JSON {error: {message}}. Refusals say `is "
        "greater than max_lora_rank`, `expected target modules`, `is unsupported LoRA weight` or `embedding LoRA "
        "size`. 404, and 500 for a rank, were seen of its build for CPUs",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/entrypoints/openai/models/serving.py, vllm/lora/worker_manager.py (_load_adapter), "
        "vllm/lora/peft_helper.py, vllm/lora/lora_model.py, vllm/lora/utils.py",
    ),
    Assumption(
        "vllm",
        "without --dtype a checkpoint in float32 is served in the first type that the device supports, bfloat16; with "
        "`float32` or `bfloat16` any checkpoint is served in that",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/config/model.py (_get_and_verify_dtype)",
    ),
    Assumption(
        "vllm",
        "--max-lora-rank takes 1, 8, 16, 32, 64, 128, 256, 320 or 512, and any rank up to it can be loaded",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/config/lora.py",
    ),
    Assumption(
        "vllm",
        "a step has at most --max-num-seqs sequences; others wait in the order in which they came. The default follows "
        "from the GPU, 256 or 1024",
        "documented",
        VLLM_ARGUMENTS,
    ),
    Assumption(
        "sglang",
        "without --max-running-requests a step has as many as memory has room for, up to thousands; others wait",
        "general knowledge",
        SGLANG_SOURCE,
    ),
    Assumption(
        "vllm",
        "--max-cpu-loras must not be less than --max-loras; the adapter used longest ago is read again from its folder",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/config/lora.py",
    ),
    Assumption(
        "vllm",
        "lm_head of Llama and Qwen 3 can have a LoRA where it is not tied to the embedding (`embedding_modules`)",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/model_executor/models/llama.py, qwen3.py; pull request 33234",
    ),
    Assumption(
        "vllm",
        "POST /v1/completions takes a list of ids as `prompt`, and the fields that `vllm_request` sends",
        "documented",
        VLLM_PROTOCOL,
    ),
    Assumption(
        "vllm",
        "with `return_token_ids` a choice has `token_ids`, whose last is the stop token where one ended it, and one "
        "entry of `logprobs.token_logprobs` for each, also with `logprobs: 0`",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/entrypoints/openai/completion/serving.py",
    ),
    Assumption(
        "vllm",
        "`ignore_eos` leaves `stop_token_ids` in force",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/v1/core/sched/utils.py",
    ),
    Assumption(
        "vllm",
        "`prompt_logprobs: 0` gives a choice's `prompt_logprobs`: null, then for each position an object by token ids "
        "with the prompt's own token in it",
        "documented",
        VLLM_PROTOCOL,
    ),
    Assumption(
        "vllm",
        "`--logprobs-mode raw_logprobs`: logprobs of sampled tokens are those before temperature, top-k and top-p",
        "documented",
        VLLM_ARGUMENTS,
    ),
    Assumption(
        "vllm",
        "a temperature of 0 is greedy; above, and up to 0.01, it is taken for 0.01",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/sampling_params.py (__post_init__)",
    ),
    Assumption(
        "vllm",
        "`seed` is a signed integer of 64 bits, and each request has its own stream",
        "documented",
        VLLM_PROTOCOL,
    ),
    Assumption(
        "vllm",
        "with --uds it listens at a Unix socket of that path and at no port, whatever --host and --port say",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/entrypoints/openai/api_server.py",
    ),
    Assumption(
        "vllm",
        "uvicorn listens at it with a backlog of 2,048: a connection beyond that fails, and the sampler opens 768",
        "read in the source",
        "encode/uvicorn: uvicorn/config.py, where `backlog` is 2048",
    ),
    Assumption(
        "sglang",
        "--config names a YAML file of flags, and with `api-key` there all routes but /health and /metrics ask for it",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/server_args_config_parser.py, python/sglang/srt/utils/common.py",
    ),
    Assumption(
        "vllm",
        "a request finds the prefixes of requests with its own `cache_salt` alone, of at most 128 characters",
        "documented",
        VLLM_PROTOCOL,
    ),
    Assumption(
        "sglang",
        "a request finds the prefixes of requests with its own `extra_key` alone",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/managers/io_struct.py, python/sglang/srt/mem_cache/radix_cache.py",
    ),
    Assumption(
        "vllm",
        "with --enable-prompt-tokens-details `usage.prompt_tokens_details.cached_tokens` is there",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/entrypoints/openai/completion/serving.py",
    ),
    Assumption(
        "vllm",
        "`logprobs: k` gives `logprobs.top_logprobs`: for each token an object with that token and the k likeliest, by "
        "`token_id:N` with `return_tokens_as_token_ids`, else by their texts, of which many tokens have the same; and "
        "`prompt_logprobs: k` names the k likeliest beside the prompt's own. What is -inf is -9999.0",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/entrypoints/openai/completion/serving.py, vllm/entrypoints/generate/base/serving.py",
    ),
    Assumption(
        "vllm",
        "`--max-logprobs`, 20 by default, bounds both numbers, and is looked at nowhere else",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/sampling_params.py, vllm/config/model.py",
    ),
    Assumption(
        "vllm",
        "`logprob_token_ids`, 128 at most and with `logprobs` set, puts just these and the drawn token into "
        "`top_logprobs`; there is nothing of the kind for positions of a prompt",
        "documented",
        VLLM_PROTOCOL,
    ),
    Assumption(
        "vllm",
        "the older model runner, which serves mixtures of experts, gives all requests of a step the columns of "
        "`logprob_token_ids` as soon as one has them: top-k rows of the others become token 0 with -inf. The newer one "
        "keeps them apart",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/v1/sample/sampler.py (Sampler.forward), vllm/v1/worker/gpu/sample/logprob.py, "
        "vllm/config/vllm.py (use_v2_model_runner)",
    ),
    Assumption(
        "vllm",
        "what an adapter adds to lm_head is in logprobs of drawn tokens. Of a prompt it is in those of the first "
        "positions alone, as many as the step has requests, and each has the one of that request's adapter",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/lora/punica_wrapper/punica_gpu.py (add_lora_logits); issue 51594, measured there on GPUs",
    ),
    Assumption(
        "vllm",
        "with `prompt_logprobs` a request reads no prefix cache, so that all positions are scored, and still fills it",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/sampling_params.py (skip_reading_prefix_cache)",
    ),
    Assumption(
        "vllm",
        "`finish_reason` is stop or length of what was finished; abort, with what there is and a status of 200, of "
        "what the engine gave up",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/v1/engine/__init__.py (FinishReason)",
    ),
    Assumption(
        "vllm",
        "stop strings are sought in the text of what is drawn; behind a prompt that ends within a character in all of "
        "the prompt's text, too: its stream of text begins with the prompt. Seen of its build for CPUs",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/v1/engine/detokenizer.py (FastIncrementalDetokenizer)",
    ),
    Assumption("vllm", "`--generation-config vllm` keeps a model's own defaults out", "documented", VLLM_ARGUMENTS),
    Assumption(
        "vllm",
        "a client that hangs up ends its request",
        "read in the source",
        f"{VLLM_SOURCE}: vllm/entrypoints/serve/utils/api_utils.py (with_cancellation)",
    ),
    Assumption(
        "sglang",
        "POST /load_lora_adapter {lora_name, lora_path} and POST /unload_lora_adapter {lora_name} answer 200, or 400 "
        "with {error_message}, also where the folder is missing",
        "documented",
        SGLANG_LORA,
    ),
    Assumption(
        "sglang",
        "without --dtype a checkpoint in float32 is served in float16; with `float32` or `bfloat16` any checkpoint is "
        "served in that",
        "documented",
        f"{SGLANG_SOURCE}: docs/advanced_features/server_arguments.md",
    ),
    Assumption(
        "sglang",
        "--max-lora-rank and --lora-target-modules all must be said at the start for adapters that come later",
        "documented",
        SGLANG_LORA,
    ),
    Assumption("sglang", "`lora_path` of POST /generate is an adapter's name, or null", "documented", SGLANG_LORA),
    Assumption(
        "sglang",
        "`all` of --lora-target-modules holds lm_head, whose weights are read where an adapter's target_modules name "
        "it, and are then in logprobs of prompts, too",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/lora/lora_manager.py (init_lora_shapes), lora.py (_process_weight), "
        "layers.py",
    ),
    Assumption(
        "sglang",
        "POST /generate takes the fields that `sglang_request` sends; `sampling_seed` and `top_k` -1 are among them",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/sampling/sampling_params.py",
    ),
    Assumption(
        "sglang",
        "`meta_info.output_token_logprobs` and `input_token_logprobs` hold [logprob, token, text]; the first entry "
        "of the input's, at `logprob_start_len`, has no logprob",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/managers/tokenizer_manager.py (detokenize_logprob_tokens), "
        "scheduler_output_processor_mixin.py (_process_input_token_logprobs)",
    ),
    Assumption(
        "sglang",
        "`top_logprobs_num: k` gives `output_top_logprobs` and, as far as the prompt is scored, `input_top_logprobs`: "
        "for each position k of [logprob, token, text], and null for the first of the input",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/managers/tokenizer_manager.py (add_logprob_to_meta_info), "
        "python/sglang/srt/layers/utils/logprob.py",
    ),
    Assumption(
        "sglang",
        "`token_ids_logprob` is one list for all positions, in the order of which `output_token_ids_logprobs` has its "
        "entries; a prefill batch with scored prompts of which one has such a list and another has none ends the "
        "scheduler",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/layers/utils/logprob.py (get_token_ids_logprobs_raw)",
    ),
    Assumption(
        "sglang",
        "of --context-length a prompt leaves 7 tokens free, and prompt and sequence together 2; a prompt that is "
        "longer is refused, a sequence ends there. With SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN it may exceed the "
        "model's own",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/managers/tp_worker.py, utils.py (validate_input_length), scheduler.py, "
        "python/sglang/srt/configs/model_config.py (_derive_context_length)",
    ),
    Assumption(
        "sglang",
        "an adapter beyond --max-loaded-loras puts the one used longest ago out, which is read again from its folder "
        "when a request names it",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/managers/tokenizer_control_mixin.py (load_lora_adapter), "
        "tokenizer_manager.py (_resolve_lora_path)",
    ),
    Assumption(
        "sglang",
        "`meta_info.finish_reason` is {type: stop, matched: id or string}, {type: length} or {type: abort, message}; "
        "matched is `NaN happened` where a token outside the vocabulary was drawn and replaced",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/managers/schedule_batch.py",
    ),
    Assumption(
        "sglang",
        "with `ignore_eos` no token stops, not even one of `stop_token_ids`; without it the model's own do, too; and a "
        "sequence that is as long as it may be ends for that, even by a stop token",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/managers/schedule_batch.py",
    ),
    Assumption(
        "sglang",
        "with SGLANG_RETURN_ORIGINAL_LOGPROB logprobs of sampled tokens are those before the temperature, else after",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/layers/sampler.py; pull request 8375",
    ),
    Assumption(
        "sglang",
        "logprobs of a prompt, its likeliest tokens and those that were named are those at temperature 1",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/layers/utils/logprob.py (temp_scaled_logprobs)",
    ),
    Assumption(
        "sglang",
        "a seed repeats a sample only under --enable-deterministic-inference, by seed and position",
        "documented",
        SGLANG_DETERMINISM,
    ),
    Assumption(
        "sglang",
        "under --enable-deterministic-inference a request without a seed draws by 42, like every other",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/sampling/sampling_batch_info.py (in a later version)",
    ),
    Assumption(
        "sglang", "`--sampling-defaults openai` keeps a model's own defaults out", "documented", SGLANG_SAMPLING
    ),
    Assumption(
        "sglang",
        "a client that hangs up ends its request",
        "read in the source",
        f"{SGLANG_SOURCE}: python/sglang/srt/managers/tokenizer_manager.py (_wait_one_response)",
    ),
)
