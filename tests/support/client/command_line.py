"""The vendor's command line, `tinker`, run in this process: a separate process takes a second to start."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result
from tinker.cli.__main__ import main_cli
from tinker.lib.internal_client_holder import sessionless_holder_cache

OF_THE_ENVIRONMENT = (None, None)


def run_tinker(*words: str, url: str, key: str | None, home: Path | None = None, typed: str = "") -> Result:
    """Run the command as a shell with these variables does. `typed` is what its user types."""
    # For the life of a process it has one server, the first that the environment named, which may be gone by now.
    sessionless_holder_cache._holders.pop(OF_THE_ENVIRONMENT, None)
    environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": key}
    environment |= {"HOME": str(home)} if home is not None else {}
    return CliRunner().invoke(main_cli, words, input=typed, env=environment)
