"""The examples as projects of their own, outside of this checkout: where they run, and on which database."""

import os
import secrets
import shutil
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy import make_url

from outboxq.postgres import Server
from tests.support.urls import libpq_url

CHECKOUT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent for path in CHECKOUT.glob("examples/*/pyproject.toml"))

_COMMANDS = ("alembic", "flask", "outboxq", "pytest", "uvicorn")
_KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
_SCRIPT = "#!{python}\nimport sys\nfrom {module} import {attribute} as main\n\nsys.exit(main())\n"


@dataclass(frozen=True)
class Installation:
    """A virtual environment that has outboxq and what it depends on, and nothing else of this checkout."""

    directory: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    def environment(self, **variables: str) -> dict[str, str]:
        """The variables of a shell in which it is active."""
        kept = {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES}
        path = os.pathsep.join([str(self.directory / "bin"), os.environ["PATH"]])
        return {**kept, "PATH": path, "VIRTUAL_ENV": str(self.directory), "COLUMNS": "120", **variables}


def install(directory: Path) -> Installation:
    """Make a virtual environment whose outboxq is this checkout's, without `tests` and `examples` on its path."""
    made = Installation(directory / ".venv")
    venv.EnvBuilder(with_pip=False, symlinks=True).create(made.directory)
    alone = directory / "alone"
    alone.mkdir()
    (alone / "outboxq").symlink_to(CHECKOUT / "outboxq")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = made.directory / "lib" / version / "site-packages"
    # A .pth file of the second folder, which would put the checkout on the path, is not read from here.
    (packages / "installed.pth").write_text(f"{alone}\n{sysconfig.get_path('purelib')}\n")
    for point in entry_points(group="console_scripts"):
        if point.name in _COMMANDS:
            script = made.directory / "bin" / point.name
            script.write_text(_SCRIPT.format(python=made.python, module=point.module, attribute=point.attr))
            script.chmod(0o755)
    return made


def copy_project(example: Path, directory: Path) -> Path:
    """Copy an example as a user does; the new folder."""
    return shutil.copytree(example, directory / example.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))


@contextmanager
def owned_database(server: Server) -> Iterator[str]:
    """An empty database of a role that may do nothing but own it; the URL, for that role."""
    name = f"outboxq_example_{secrets.token_hex(6)}"
    with psycopg.connect(libpq_url(server.url), autocommit=True) as connection:
        role = sql.Identifier(name)
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(name)))
        try:
            with server.create_database() as database:
                owner = sql.SQL("ALTER DATABASE {} OWNER TO {}").format(sql.Identifier(database.name), role)
                connection.execute(owner)
                url = make_url(database.url).set(username=name, password=name)
                yield url.render_as_string(hide_password=False)
        finally:
            connection.execute(sql.SQL("DROP ROLE {}").format(role))
