"""The lowest version of each dependency that pyproject.toml allows, on the oldest Python: users are given them too."""

import os
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.interpreters import OLDEST, interpreters

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What tests and checkers are made of is installed in its newest version.
NOT_OF_USERS = {"test", "docs", "dev"}
# What the tests below need besides; over the extra `test` as a whole pip ponders for minutes.
TOOLS = (
    "asyncpg attrs hypothesis httpx opentelemetry-sdk pglast playwright psutil pydantic pytest pytest-timeout "
    "pytest-xdist sqlmodel"
)
# Import, codec, handlers, Alembic, migration and relays (by the demo), dashboard, middleware, metrics, traces, `top`.
TESTS = [
    "tests/package/test_public_surface.py",
    "tests/codec/test_sameness.py",
    "tests/handlers/test_deferred_writes.py",
    "tests/migrations/test_alembic_plugin.py",
    "tests/migrations/test_repository_alembic.py",
    "tests/demo/test_demo.py::test_the_demo_kills_a_relay_at_work_and_finds_nothing_lost_or_doubled",
    "tests/cli/test_top.py::test_a_killed_relay_is_seen_in_a_real_terminal",
    "tests/dashboard/test_command.py",
    "tests/http/test_idempotency.py",
    "tests/observability/test_metrics_relay.py::test_what_happened_is_counted",
    "tests/observability/test_otel.py",
]


def bounds() -> Iterator[str]:
    """The lower bound of each dependency of the package and of the extras that users install, as a constraint."""
    extras: Mapping[str, list[str]] = PROJECT["optional-dependencies"]
    of_users = [each for name, required in extras.items() if name not in NOT_OF_USERS for each in required]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *of_users]):
        if requirement.name != PROJECT["name"]:
            (lowest,) = (each.version for each in requirement.specifier if each.operator == ">=")
            yield f"{requirement.name}=={lowest}"
            # The tests' half of OpenTelemetry goes with the API of its version alone.
            if requirement.name == "opentelemetry-api":
                yield f"opentelemetry-sdk=={lowest}"


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_the_package_works_with_the_lowest_versions_that_it_allows(tmp_path: Path) -> None:
    """Every bound is a version that exists, that goes together with the others, and that our tests are green with."""
    version, oldest = next(iter(interpreters().items()))
    if version != OLDEST:
        pytest.skip("this machine has no Python 3.11, the oldest that the package takes")
    python = tmp_path / "venv" / "bin" / "python"
    run(str(oldest), "-m", "venv", str(tmp_path / "venv"))
    constraints = tmp_path / "lowest.txt"
    constraints.write_text("\n".join(sorted(set(bounds()))))
    extras = ",".join(sorted(PROJECT["optional-dependencies"].keys() - NOT_OF_USERS))
    run(str(python), "-m", "pip", "install", "-c", str(constraints), f".[{extras}]", *TOOLS.split())
    # Old versions warn of each other's newest ones.
    options = ["-q", "-n", "2", "-o", "filterwarnings=", "-p", "no:cacheprovider", "-m", "not wide"]
    run(str(python), "-m", "pytest", *options, *TESTS)


def run(*command: str) -> None:
    # The worker that runs this test is none of those that the command starts.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
