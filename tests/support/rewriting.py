"""The test files' bytecode with pytest's asserts, made once by the workers of a run together.

Every worker of pytest-xdist collects all files at the same time as the others. In a fresh checkout each would rewrite
the asserts of each file, which is most of what collecting costs.
"""

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


def rewrite_share(config: pytest.Config) -> None:
    """Write the bytecode of this worker's share of the files; a run without workers has none.

    A file that another worker has not come to yet is rewritten when it is collected, as ever.
    """
    given = getattr(config, "workerinput", None)
    if given is None:
        return
    number, workers = int(given["workerid"].removeprefix("gw")), given["workercount"]
    for path in sorted(set(_files(config)))[number::workers]:
        _rewrite(config, path)


def _files(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = config.invocation_params.dir / argument.split("::")[0]
        yield from path.rglob("test_*.py") if path.is_dir() else [path]


def _rewrite(config: pytest.Config, path: Path) -> None:
    module = ModuleType(path.stem)
    module.__spec__ = spec_from_file_location(path.stem, path)
    # The hook writes the bytecode, then runs it: without `__import__` it ends at its first line, which is an import.
    vars(module)["__builtins__"] = {}
    with suppress(AttributeError, ImportError, OSError, SyntaxError):
        config.pluginmanager.rewrite_hook.exec_module(module)
