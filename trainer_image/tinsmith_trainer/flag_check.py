"""`python -m tinsmith_trainer.flag_check FLAGS`: whether a worker would take these flags. Nothing is started.

For a server, which starts its workers when they are needed, and must not find out only then. No framework is imported.
"""

from __future__ import annotations

import sys

from tinsmith_trainer.options import EXIT_USAGE, UsageError, parse_options


def main() -> int:
    """Prints the sentence that the worker would end with."""
    try:
        parse_options(sys.argv[1:])
    except UsageError as error:
        print(f"tinsmith-trainer: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
