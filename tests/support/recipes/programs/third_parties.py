"""Programs that stand on OpenAI's client."""

from __future__ import annotations

from support.recipes.checks import calls, prints, stays_near
from support.recipes.names import BRIEF
from support.recipes.program import SCRIPTS, Program, installed

THIRD_PARTIES = (
    installed(
        "verifiers",
        [stays_near("rollouts", 24, 0), stays_near("in a box", 24, 4), calls(completions=24)],
        "python",
        str(SCRIPTS / "verifiers_environment.py"),
        BRIEF,
    ),
    Program(
        "verifiers-0.4",
        (
            *(str(SCRIPTS / "with_packages.py"), "{verifiers}", str(SCRIPTS / "verifiers_sums.py")),
            *(BRIEF, "{url}", "{folder}"),
        ),
        [stays_near("rollouts", 24, 0), stays_near("in a box", 24, 4), calls(completions=24)],
    ),
    installed(
        "inspect-ai",
        [calls(completions=6), prints("accuracy")],
        "inspect",
        *("eval", "inspect_task.py", "--model", f"openai-api/local/{BRIEF}"),
        *("--display", "plain", "--log-dir", "{folder}"),
        folder=str(SCRIPTS),
    ),
    installed(
        "lm-eval",
        [calls(completions=3), prints("sums_of_ours"), prints("exact_match")],
        "lm_eval",
        *("run", "--model", "local-chat-completions", "--apply_chat_template", "--tasks", "sums_of_ours"),
        "--model_args",
        f"model={BRIEF},base_url={{url}}/oai/api/v1/chat/completions,num_concurrent=2",
        *("--include_path", ".", "--output_path", "{folder}"),
        folder=str(SCRIPTS),
    ),
    installed(
        "mini-swe-agent",
        [calls(completions=2), prints("LimitsExceeded")],
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
