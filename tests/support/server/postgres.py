"""A real PostgreSQL for tests, from the machine's packages: one server, a fresh schema per test."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from support.requirements import InstalledBy, require

MISSING = "PostgreSQL is not installed"

# Nothing here outlives the machine, so nothing needs to reach the disk. What was committed outlives `crash`, since
# that ends processes only: it must have left them, which `synchronous_commit` says.
_SETTINGS = {"listen_addresses": "", "fsync": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class PostgresServer:
    """A running server, reached through a Unix socket in `directory` as its superuser."""

    directory: Path
    superuser: str = "tinsmith"

    def create_schema(self) -> str:
        """Return the URL of an empty schema: as good as a database of its own, and made in a millisecond."""
        schema = f"test_{uuid.uuid4().hex}"
        self._run_sql(f'CREATE SCHEMA "{schema}"')
        return self._url(options=f"-csearch_path={schema}")

    def drop_schema(self, url: str) -> None:
        schema = parse_qs(urlsplit(url).query)["options"][0].removeprefix("-csearch_path=")
        self._run_sql(f'DROP SCHEMA "{schema}" CASCADE')

    def with_fast_clock(self, url: str, hours: int) -> str:
        """Return the URL of a schema whose clock runs so far ahead of this machine's."""
        schema = parse_qs(urlsplit(url).query)["options"][0].removeprefix("-csearch_path=")
        ahead = f"SELECT pg_catalog.clock_timestamp() + interval '{hours} hours'"
        self._run_sql(
            f'CREATE FUNCTION "{schema}".clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $${ahead}$$'
        )
        # PostgreSQL's own functions come first, unless the path names their schema behind.
        return self._url(options=f"-csearch_path={schema},pg_catalog")

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Take no writes, as a standby and a demoted primary do. Connections stay open and hear of it, too."""
        self._set_read_only("on")
        try:
            yield
        finally:
            self._set_read_only("off")

    def _set_read_only(self, value: str) -> None:
        self._run_sql(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
        self._run_sql("SELECT pg_reload_conf()")
        # The postmaster tells its processes before it reads the file for new ones.
        while self._run_sql("SHOW default_transaction_read_only") != value:
            pass

    def drop_connections(self) -> None:
        """End every other connection, as a restart of the server would."""
        others = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
        self._run_sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")

    def crash(self) -> None:
        """End the server like a `kill -9` of the postmaster: running transactions are lost, committed ones are not."""
        _run(_programs() / "pg_ctl", self, "stop", "--mode=immediate", "--wait")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all processes of the server, as a frozen host does: the kernel still answers for them."""
        # Here, since the worker's tests also run where this package is not.
        import psutil

        postmaster = psutil.Process(int((self.directory / "data" / "postmaster.pid").read_text().split()[0]))
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def start(self) -> None:
        """Start the server on its data. It recovers first where it crashed."""
        _start(_programs(), self)

    def _url(self, **parameters: str) -> str:
        query = urlencode({"host": str(self.directory), **parameters})
        return f"postgresql://{self.superuser}@/postgres?{query}"

    def _run_sql(self, statement: str) -> Any:
        """Return the first value of the answer; None where it has no rows."""
        # Here, since the worker's tests also run where no server's packages are.
        import psycopg

        with psycopg.connect(self._url(), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def find_postgres() -> Path | None:
    """Return the folder of `initdb` and `pg_ctl`: on the PATH, or Debian's, the newest version first."""
    on_path = shutil.which("pg_ctl")
    folders = [Path(on_path).resolve().parent] if on_path else []
    debian = Path("/usr/lib/postgresql").glob("*/bin")
    folders += sorted(debian, key=lambda folder: float(folder.parent.name), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a PostgreSQL server. Where PostgreSQL is missing, `require` decides about the test."""
    require(find_postgres() is not None, MISSING, InstalledBy.DEBIAN_PACKAGES)
    # Not pytest's tmp_path: a socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="tinsmith-pg-"))
    server = PostgresServer(directory)
    try:
        _initialise(_programs(), server)
        server.start()
        yield server
    finally:
        if (directory / "data" / "postmaster.pid").exists():
            server.crash()
        shutil.rmtree(directory)


def _programs() -> Path:
    programs = find_postgres()
    assert programs is not None, MISSING
    return programs


def _initialise(programs: Path, server: PostgresServer) -> None:
    owner = _unprivileged_user()
    if owner is not None:
        os.chown(server.directory, owner.pw_uid, owner.pw_gid)
    initialise = ["--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C", f"--username={server.superuser}"]
    _run(programs / "initdb", server, *initialise)


def _start(programs: Path, server: PostgresServer) -> None:
    settings = {**_SETTINGS, "unix_socket_directories": str(server.directory)}
    options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
    log = server.directory / "log"
    _run(programs / "pg_ctl", server, "start", "--wait", f"--log={log}", f"--options={options}")


def _run(program: Path, server: PostgresServer, *arguments: str) -> None:
    done = subprocess.run(
        [*_as_owner(), program, *arguments, f"--pgdata={server.directory / 'data'}"],
        cwd=server.directory,
        env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        log = server.directory / "log"
        said = log.read_text() if log.exists() else ""
        raise RuntimeError(f"{program.name} failed with status {done.returncode}: {done.stdout}{done.stderr}{said}")


def _as_owner() -> list[str]:
    """Return a command that changes the user and runs PostgreSQL.

    If subprocess changed the user, it would have to fork this process, and gRPC, which may run in it, does not always
    survive that.
    """
    owner = _unprivileged_user()
    if owner is None:
        return []
    return ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups", "--"]


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Return the user of the server, or None for the present one. PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    users = {user.pw_name: user for user in pwd.getpwall()}
    return users.get("postgres") or users["nobody"]
