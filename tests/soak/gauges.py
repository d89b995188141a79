"""What a process and the server's side of its connections hold at this moment, from /proc and pg_stat_activity."""

from pathlib import Path

from sqlalchemy import Connection, text

_BACKENDS = text(
    "SELECT pid FROM pg_stat_activity WHERE application_name = :name AND datname = current_database() "
    "AND pid <> pg_backend_pid()"
)
_FIELDS = {"VmRSS": "resident_kb", "RssAnon": "anonymous_kb", "Threads": "threads"}


def measure_process(pid: int) -> dict[str, float]:
    """Memory, threads and open descriptors; nothing of a process that has ended."""
    directory = Path(f"/proc/{pid}")
    try:
        measured = _status(directory)
        measured["descriptors"] = sum(1 for _ in (directory / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return {}
    # What has ended and was not waited for has neither memory nor threads.
    return measured if "resident_kb" in measured else {}


def measure_backends(connection: Connection, name: str) -> dict[str, float]:
    """How many connections have this application name, and the memory of their backends, without what all share."""
    pids = connection.execute(_BACKENDS, {"name": name}).scalars().all()
    measured: dict[str, float] = {"connections": len(pids)}
    memory = [kilobytes for pid in pids if (kilobytes := _anonymous_kilobytes(pid)) is not None]
    if memory:
        measured["backend_kb"] = sum(memory) / len(memory)
    return measured


def _anonymous_kilobytes(pid: int) -> float | None:
    try:
        return _status(Path(f"/proc/{pid}")).get("anonymous_kb")
    # It has ended since.
    except (FileNotFoundError, ProcessLookupError):
        return None


def _status(directory: Path) -> dict[str, float]:
    lines = (line.split(":", 1) for line in (directory / "status").read_text().splitlines())
    return {_FIELDS[name]: float(value.split()[0]) for name, value in lines if name in _FIELDS}
