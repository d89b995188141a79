"""The Alembic plugin, which every project with outboxq installed imports, whether it uses it or not."""

import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType

PROBE = """\
import sys
import alembic.command
from alembic.operations import Operations
assert hasattr(Operations, "outboxq_upgrade") and hasattr(Operations, "outboxq_downgrade")
print(*sorted(name for name in sys.modules if name.split(".")[0] == "outboxq"))
"""


def test_importing_alembic_imports_nothing_of_outboxq_but_the_plugin() -> None:
    """The plugin costs a project that does not use it nothing worth measuring."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["outboxq", "outboxq.alembic_plugin"]


def test_every_loader_of_plugins_that_alembic_had_finds_the_plugin() -> None:
    """Alembic 1.18 to 1.20.0 iterate over what the entry point loads; from 1.20.1 on it is to be a module."""
    (plugin,) = (found for found in entry_points(group="alembic.plugins") if found.name == "outboxq")
    loaded = plugin.load()
    assert isinstance(loaded, ModuleType)
    assert list(loaded) == [loaded]
    assert callable(loaded.setup)
