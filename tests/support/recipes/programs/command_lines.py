"""Commands of rlcli, a command line for training on a server of Tinker's protocol."""

from __future__ import annotations

from collections.abc import Sequence

from support.recipes.checks import (
    LOSS,
    SAMPLER_IS_TRAINER,
    UNIFORM_LOSS,
    Check,
    calls,
    checkpoints,
    falls,
    prints,
    steps,
)
from support.recipes.names import BRIEF, CHAT_FILE, LLAMA
from support.recipes.program import SCRIPTS, Program

TRAINED = "rlcli train sl"
SUPERVISED_STEPS, REWARDED_STEPS, GROUPS, ATTEMPTS = 8, 3, 8, 8


def rlcli(name: str, checks: Sequence[Check], *arguments: str, after: str | None = None) -> Program:
    """Return a command, run as its console script does. The commands ignore TINKER_BASE_URL where they train."""
    console_script = ("-c", "from rlcli.cli import main; main()")
    command = (str(SCRIPTS / "with_packages.py"), "{rlcli}", *console_script, *name.split(), "--base-url", "{url}")
    return Program(f"rlcli {name}", (*command, *arguments), checks, after=after)


COMMAND_LINES = (
    rlcli(
        "train sl",
        [
            steps(LOSS, SUPERVISED_STEPS),
            UNIFORM_LOSS,
            falls(LOSS, by=1.0),
            calls(create_model=1, forward_backward=SUPERVISED_STEPS, optim_step=SUPERVISED_STEPS),
            checkpoints("000003", "000006", "final"),
        ],
        *("--model", LLAMA, "--dataset", CHAT_FILE, "--batch-size", "32", "--lr", "2e-2"),
        *("--save-every", "3", "--log-path", "{folder}/log"),
    ),
    rlcli(
        "sample",
        [calls(asample=1)],
        *("--model", LLAMA, "--checkpoint", "{sampler_path}", "--prompt", "How much is 2 + 2?", "--max-tokens", "16"),
        after=TRAINED,
    ),
    rlcli("checkpoint", [prints("│ weights/000003 "), prints("│ sampler_weights/final ")], "list", after=TRAINED),
    rlcli("run", [prints("Run ID"), calls(training_runs=1)], "list", after=TRAINED),
    rlcli(
        "train rl",
        [
            SAMPLER_IS_TRAINER,
            steps("optim/kl_sample_train_v2", REWARDED_STEPS),
            calls(
                asample=REWARDED_STEPS * GROUPS * ATTEMPTS, forward_backward=REWARDED_STEPS, optim_step=REWARDED_STEPS
            ),
            checkpoints("final"),
        ],
        *("--model", BRIEF, "--loss", "gspo", "--batch-size", str(GROUPS), "--group-size", str(ATTEMPTS)),
        *("--max-steps", str(REWARDED_STEPS), "--lr", "1e-3", "--log-path", "{folder}/log"),
    ),
)
