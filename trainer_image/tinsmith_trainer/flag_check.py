"""`python -m tinsmith_trainer.flag_check FLAGS`: whether a worker would take these flags, and whether the server of a
sampler is installed here. Nothing is started.

For a server, which starts its workers when they are needed, and must not find out only then. No framework is imported.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from tinsmith_trainer.options import EXIT_USAGE, TOKEN_SERVERS, UsageError, parse_options


def main() -> int:
    """Prints the sentence that the worker would end with."""
    try:
        options = parse_options(sys.argv[1:])
    except UsageError as error:
        return _refused(str(error))
    if options.engine in TOKEN_SERVERS and not has_server(options.engine, options.server_environment):
        here = "on the PATH" if options.engine == "vllm" else "beside this program"
        where = here if options.server_environment is None else f"in {options.server_environment}"
        return _refused(
            f"there is no {options.engine} {where}. Install it in a virtual environment of its own, and name that"
        )
    return 0


def has_server(engine: str, environment: Path | None) -> bool:
    """vLLM is a program, SGLang a module, which in another environment its start finds or not."""
    if environment is not None:
        return shutil.which("vllm" if engine == "vllm" else "python", path=environment / "bin") is not None
    if engine == "vllm":
        return shutil.which("vllm") is not None
    return importlib.util.find_spec(engine) is not None


def _refused(sentence: str) -> int:
    print(f"tinsmith-trainer: {sentence}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
