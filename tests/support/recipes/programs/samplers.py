"""Programs that sample, and that take checkpoints home."""

from __future__ import annotations

from support.recipes.checks import calls, ends_above, prints, stays_between, stays_near, steps
from support.recipes.names import BRIEF, LLAMA
from support.recipes.program import SCRIPTS, Program, script

CHAT = ("-m", "tinker_cookbook.chat_app.tinker_chat_cli")
SAVED_SAMPLERS = (
    Program(
        "chat_app.tinker_chat_cli",
        (*CHAT, f"base_model={BRIEF}"),
        [prints(r"Assistant: \boxed{"), prints("Goodbye"), calls(asample=2)],
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
        [prints("Assistant: "), prints("Goodbye"), calls(asample=1)],
        typed="How much is 2 + 2?\nquit\n",
        every_run=True,
        after="chat_sl.train",
    ),
    script(
        "weights",
        [
            stays_near("apart from the merged model", 0, 1e-4),
            stays_near("apart from the peft model", 0, 1e-4),
            ends_above("apart from the base model", 0.1),
            calls(save_weights_external=1, load_weights=1),
        ],
        LLAMA,
        "{state_path}",
        "{sampler_path}",
        "{folder}",
        after="chat_sl.train",
        every_run=True,
    ),
    script(
        "benchmark",
        [stays_near("examples", 16, 0), stays_near("errors", 0, 0), calls(asample=16)],
        BRIEF,
        every_run=True,
    ),
    Program(
        "tinkerscope",
        (
            *(str(SCRIPTS / "with_packages.py"), "{playground}", str(SCRIPTS / "playground.py")),
            *(LLAMA, "{folder}", "{state_path}", "{sampler_path}"),
        ),
        [stays_near("sampleable runs", 1, 0), stays_near("failed", 0, 0), calls(asample=4)],
        after="chat_sl.train",
    ),
    Program(
        "art",
        (*(str(SCRIPTS / "with_packages.py"), "{art}", str(SCRIPTS / "art_loop.py")), BRIEF, "{folder}"),
        [steps("step", 3), stays_near("resumed at", 3, 0), calls(asample=51, forward_backward=3, load_weights=1)],
    ),
    script("capture_proxy", [stays_between("answered", 0, 17), calls(asample=2)], BRIEF, "{folder}", every_run=True),
)
