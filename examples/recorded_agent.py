"""Train an agent that uses a tool. The agent knows only the `openai` package. docs/how-to/agents.md explains it."""

import json
import os
from typing import Any

import tinker
from openai import OpenAI
from tinker import types
from tinsmith.training import Recording, group_datums, open_recording

MODEL, STEPS, GROUP_SIZE = "tiny", 3, 6
QUESTIONS = [(2, 3), (4, 4)]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]


def agent(client: OpenAI, question: str) -> list[Any]:
    """Return the conversation about the question. The model may call the tool in up to three turns."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(4):
        answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, max_tokens=48)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return messages


def reward_of(messages: list[Any], expected: str) -> float:
    """Return 0.5 for the right use of the tool, and 0.5 for the right answer."""
    is_used = any(message["role"] == "tool" and message["content"] == expected for message in messages)
    return 0.5 * is_used + 0.5 * (messages[-1].get("content") == expected)


def calculate(arguments: str) -> str:
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) + int(numbers["b"]))
    except (ValueError, KeyError, TypeError):
        return "add needs the integers a and b"


def demonstrate(model: tinker.TrainingClient) -> None:
    """Teach the form of a call and of an answer, because the tiny model has random weights."""
    tokenizer = model.get_tokenizer()
    data = []
    for a, b in QUESTIONS:
        function = {"name": "add", "arguments": {"a": a, "b": b}}
        messages: list[Any] = [
            {"role": "user", "content": f"{a}+{b}"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": str(a + b)},
        ]
        for end in (2, 4):
            prompt = tokenizer.apply_chat_template(
                messages[: end - 1], tools=TOOLS, add_generation_prompt=True, tokenize=False
            )
            whole = tokenizer.apply_chat_template(messages[:end], tools=TOOLS, tokenize=False)
            data.append(datum(tokenizer, prompt, whole.removeprefix(prompt).rstrip("\n")))
    for _ in range(80):
        model.forward_backward(data, "cross_entropy")
        step = model.optim_step(types.AdamParams(learning_rate=3e-3))
    step.result()


def datum(tokenizer: Any, prompt: str, answer: str) -> types.Datum:
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    tokens, weights = [*before, *after], [0.0] * (len(before) - 1) + [1.0] * len(after)
    inputs: Any = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rollout(path: str, question: str, expected: str) -> tuple[Recording, float]:
    recording = open_recording(path, ttl_seconds=3600)
    client = OpenAI(base_url=recording.base_url, api_key=os.environ["TINKER_API_KEY"])
    return recording, reward_of(agent(client, question), expected)


def main() -> None:
    model = tinker.ServiceClient().create_lora_training_client(MODEL, rank=32, seed=1).result()
    demonstrate(model)
    for step in range(STEPS):
        path = model.save_weights_for_sampler(f"step-{step}").result().path
        groups = [[rollout(path, f"{a}+{b}", str(a + b)) for _ in range(GROUP_SIZE)] for a, b in QUESTIONS]
        turns = [len(one.turns) for group in groups for recording, _ in group for one in recording.sequences()]
        data = [one for group in groups for one in group_datums(group)]
        if data:
            model.forward_backward(data, "importance_sampling").result()
            model.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        rewards = [reward for group in groups for _, reward in group]
        print(step, f"reward {sum(rewards) / len(rewards):.2f}", f"turns {turns}", f"data {len(data)}", flush=True)
        for group in groups:
            for recording, _ in group:
                recording.delete()


main()
