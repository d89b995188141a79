"""The Alembic plugin, which every project with outboxq installed imports, whether it uses it or not."""

import subprocess
import sys

PROBE = """\
import sys
import alembic.command
from alembic.operations import Operations
assert hasattr(Operations, "outboxq_upgrade") and hasattr(Operations, "outboxq_downgrade")
print(*sorted(name for name in sys.modules if name.split(".")[0] == "outboxq"))
"""


def test_importing_alembic_imports_nothing_of_outboxq_but_the_plugin() -> None:
    """The plugin costs a project that does not use it nothing worth measuring."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["outboxq", "outboxq.alembic_plugin"]
