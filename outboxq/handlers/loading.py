"""Finds the registry that `MODULE:ATTRIBUTE` names, in a process that was started to work for it."""

import importlib
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from outboxq.errors import ConfigError, OutboxqError
from outboxq.forks import call_here
from outboxq.names import with_article

if TYPE_CHECKING:
    from outboxq.handlers.registry import Jobs

_MAX_MESSAGE_CHARACTERS = 300
_PACKAGE = Path(__file__).parents[1]
_STANDARD = frozenset(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_INSTALLED = frozenset({"site-packages", "dist-packages"})


class StoppedEarly(SystemExit):
    """A signal stopped the process before work began, perhaps during the import of the registry's module."""


def load_jobs(target: str) -> "Jobs":
    """Import the registry that `target` (`MODULE:ATTRIBUTE`) names, with the current directory on the path.

    Raises:
        ConfigError: no such module, one that fails while it is imported, or something other than a `Jobs`.
        StoppedEarly: a signal came while it was imported.
    """
    from outboxq.handlers.registry import Jobs

    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise ConfigError(f"expected MODULE:ATTRIBUTE, for example myapp.jobs:jobs, got {target!r}")
    module = _import(module_name)
    found: object = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"module {module_name!r} has no {attribute!r}{_offer(module, module_name)}")
        found = getattr(found, name)
    if not isinstance(found, Jobs):
        raise ConfigError(
            f"{target} is {with_article(type(found).__name__)}, and a relay needs an outboxq.Jobs"
            f"{_offer(module, module_name)}"
        )
    return found


def _import(name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return call_here(importlib.import_module, name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"no module {error.name!r} on the path or in {directory}: name it as it is imported, "
                "for example myapp.jobs:jobs"
            ) from error
        raise _failed(name, error) from error
    except StoppedEarly:
        raise
    except (Exception, SystemExit) as error:
        raise _failed(name, error) from error


def _failed(name: str, error: BaseException) -> ConfigError:
    message, place = (str(error).splitlines() or [""])[0], _at(error)
    if isinstance(error, OutboxqError):
        # A message of outboxq's own is shown whole, and may end with the place.
        said = message if message.endswith(place) else f"{message} ({place})"
    else:
        said = f"{type(error).__name__}: {message[:_MAX_MESSAGE_CHARACTERS]} ({place})"
    return ConfigError(f"module {name!r} failed while it was imported: {said}")


def _at(error: BaseException) -> str:
    """Return, for an error message, the innermost file and line of a traceback outside outboxq and Python's library."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    found = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in found if _is_theirs(Path(frame.filename))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "outside any file"


def _is_theirs(file: Path) -> bool:
    if _PACKAGE in file.parents or "importlib" in str(file):
        return False
    return _STANDARD.isdisjoint(file.parents) or not _INSTALLED.isdisjoint(file.parts)


def _offer(module: ModuleType, name: str) -> str:
    from outboxq.handlers.registry import Jobs

    found = sorted(attribute for attribute, value in vars(module).items() if isinstance(value, Jobs))
    return f" (registries there: {', '.join(f'{name}:{attribute}' for attribute in found)})" if found else ""
