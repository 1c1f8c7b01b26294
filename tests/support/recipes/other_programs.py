"""Programs of `make recipes` that train little: chats, exports, the cookbook's own tests, and programs of others."""

from __future__ import annotations

from support.recipes.checks import asked, ends_above, prints, stays_between, stays_near
from support.recipes.names import BRIEF, LLAMA, QWEN
from support.recipes.program import SCRIPTS, Program, installed, own_tests, script

CHAT = ("-m", "tinker_cookbook.chat_app.tinker_chat_cli")
SAVED_SAMPLERS = (
    Program(
        "chat_app.tinker_chat_cli",
        (*CHAT, f"base_model={BRIEF}"),
        [prints(r"Assistant: \boxed{"), prints("Goodbye"), asked(asample=2)],
        typed="How much is 2 + 2?\nAnd 3 more?\nquit\n",
        every_run=True,
    ),
    Program(
        "chat_app.tinker_chat_cli on a saved sampler",
        (
            *CHAT,
            f"base_model={LLAMA}",
            "model_path={sampler_path}",
            "max_tokens=24",
        ),
        [prints("Assistant: "), prints("Goodbye"), asked(asample=1)],
        typed="How much is 2 + 2?\nquit\n",
        after="chat_sl.train",
    ),
    script(
        "weights",
        [
            stays_near("apart from the merged model", 0, 1e-4),
            stays_near("apart from the peft model", 0, 1e-4),
            ends_above("apart from the base model", 0.1),
            asked(save_weights_external=1, load_weights=1),
        ],
        LLAMA,
        "{state_path}",
        "{sampler_path}",
        "{folder}",
        after="chat_sl.train",
        every_run=True,
    ),
    script("benchmark", [stays_near("examples", 16, 0), stays_near("errors", 0, 0), asked(asample=16)], BRIEF),
    script("capture_proxy", [stays_between("answered", 0, 17), asked(asample=2)], BRIEF, "{folder}", every_run=True),
)

OWN_TESTS = (
    own_tests("tests/weights/test_lifecycle.py", [BRIEF], [prints("1 passed"), asked(save_weights_external=1)]),
    own_tests(
        "tests/weights/test_partial_lora_lifecycle.py",
        [QWEN, BRIEF],
        [prints("4 passed"), asked(create_model=4, save_weights_external=4)],
        *("-k", "not MoE"),
    ),
)

THIRD_PARTIES = (
    installed(
        "verifiers",
        [stays_near("rollouts", 24, 0), stays_near("in a box", 24, 4), asked(completions=24)],
        "python",
        str(SCRIPTS / "verifiers_environment.py"),
        BRIEF,
    ),
    installed(
        "inspect-ai",
        [asked(completions=6), prints("accuracy")],
        "inspect",
        *("eval", "inspect_task.py", "--model", f"openai-api/local/{BRIEF}"),
        *("--display", "plain", "--log-dir", "{folder}"),
        folder=str(SCRIPTS),
    ),
    installed(
        "mini-swe-agent",
        [asked(completions=2), prints("LimitsExceeded")],
        "mini",
        *(
            "--yolo",
            "--exit-immediately",
            "--model",
            f"openai/{BRIEF}",
            "--task",
            "Say hello.",
            "--config",
            "mini.yaml",
        ),
        *("--config", "agent.step_limit=2", "--output", "{folder}/trajectory.json"),
    ),
)

OTHERS = (*SAVED_SAMPLERS, *OWN_TESTS, *THIRD_PARTIES)
