"""The environments of the peers: made by `python -m venv` with pip, or by npm, outside of the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.definitions import Language, Peer

_MARK = "outboxq-installed"


class InstallFailed(Exception):
    """A client of a registry, or something that it needs, failed."""


def default_directory() -> Path:
    """The directory of the environments by default: under the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "outboxq-benchmarks" / "peers"


def environment(peer: Peer, directory: Path) -> Path:
    """The peer's own."""
    return directory / peer.package


def is_installed(peer: Peer, directory: Path) -> bool:
    """Return True if its environment exists, with what its definition file requires today."""
    mark = environment(peer, directory) / _MARK
    return mark.is_file() and mark.read_text() == peer.definition.read_text()


def not_installed(peer: Peer) -> str:
    """The message about a peer without an environment."""
    return f"not installed: python -m benchmarks.peers install {peer.name}"


def install(peer: Peer, directory: Path) -> Path:
    """Make its environment from nothing, and return where it is.

    Raises:
        InstallFailed: an interpreter or npm is missing, or installing failed.
    """
    target = environment(peer, directory)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if peer.language is Language.python:
        _call([_interpreter(peer), "-m", "venv", str(target)])
        _call([str(target / "bin" / "pip"), "install", "--quiet", "--requirement", str(peer.definition)])
    else:
        shutil.copy(peer.definition, target)
        _call(["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"], directory=target)
    shutil.copy(peer.definition, target / _MARK)
    return target


def driver_command(peer: Peer, directory: Path) -> list[str]:
    """Return the command that starts its driver, without arguments. Node finds packages from the working directory."""
    home = environment(peer, directory)
    if peer.language is Language.python:
        return [str(home / "bin" / "python"), str(peer.directory / "driver.py")]
    return [str(home / "node_modules" / ".bin" / "node"), str(peer.directory / "driver.mjs")]


def _interpreter(peer: Peer) -> str:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not peer.python or own in peer.python:
        return sys.executable
    found = (_runnable(f"python{version}") for version in peer.python)
    interpreter = next(filter(None, found), None)
    if interpreter is None:
        raise InstallFailed(f"{peer.name} needs Python {' or '.join(peer.python)} on PATH, this is {own}")
    return interpreter


def _runnable(name: str) -> str | None:
    # A version manager leaves names on PATH that only print an error.
    path = shutil.which(name)
    works = path is not None and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    return path if works else None


def _call(command: list[str], directory: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise InstallFailed(f"{command[0]} is not on PATH") from error
    if done.returncode:
        raise InstallFailed(f"{' '.join(command[:3])} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
