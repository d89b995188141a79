"""Which code is an application's own, wherever and however it is installed."""

import importlib
import importlib.metadata
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from outboxq.execution.failure import Frame, homes_of, where

FILES = {
    # An application of two top-level packages and a module, and beside it what it uses.
    "homes_shop/__init__.py": "",
    "homes_shop/jobs.py": "",
    "homes_core/__init__.py": "",
    "homes_tools.py": "",
    "homes_library/__init__.py": "",
    # Two distributions in one namespace.
    "homes_acme/shop/__init__.py": "",
    "homes_acme/core/__init__.py": "",
    "homes_alone.py": "",
    # An application as Debian packages it.
    "homes_debian/__init__.py": "",
    "homes_debian_core/__init__.py": "",
}
RECORDS = {
    "homes_shop-1.0": ["homes_shop/__init__.py", "homes_shop/jobs.py", "homes_core/__init__.py", "homes_tools.py"],
    "homes_library-1.0": ["homes_library/__init__.py", "../../bin/homes_shop"],
    "homes_acme_shop-1.0": ["homes_acme/shop/__init__.py"],
    "homes_acme_core-1.0": ["homes_acme/core/__init__.py"],
    "homes_alone-1.0": ["homes_alone.py", "__pycache__/homes_alone.cpython-311.pyc"],
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of installed packages, on the path."""
    folder = tmp_path_factory.mktemp("image") / "site-packages"
    for name, written in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(written)
    for name, files in RECORDS.items():
        metadata = folder / f"{name}.dist-info"
        metadata.mkdir()
        listed = [*files, f"{name}.dist-info/RECORD"]
        (metadata / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in listed))
    (folder / "homes_debian-1.0.egg-info").mkdir()
    (folder / "homes_debian-1.0.egg-info" / "top_level.txt").write_text("homes_debian\nhomes_debian_core\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.startswith("homes_")]:
        del sys.modules[name]


def is_own(module: str, file: Path) -> bool:
    """Whether a frame in this file counts as code of the application whose handler is in this module."""
    importlib.import_module(module)
    library = Frame("/image/lib/python3/site-packages/sqlalchemy/orm.py", 2, "flush")
    return where([Frame(str(file), 1, "f"), library], homes_of(module))[-1].endswith(":1 in f")


@pytest.mark.parametrize(
    ("module", "file", "own"),
    [
        ("homes_shop.jobs", "homes_shop/jobs.py", True),
        ("homes_shop.jobs", "homes_core/__init__.py", True),
        ("homes_shop.jobs", "homes_tools.py", True),
        ("homes_shop.jobs", "homes_library/__init__.py", False),
        ("homes_tools", "homes_shop/jobs.py", True),
        ("homes_alone", "homes_alone.py", True),
        ("homes_alone", "homes_alone_not.py", False),
        ("homes_acme.shop", "homes_acme/core/__init__.py", True),
        ("homes_debian", "homes_debian_core/__init__.py", True),
        ("homes_debian", "homes_shop/jobs.py", False),
    ],
)
def test_the_code_of_the_same_distribution_is_the_applications(
    module: str, file: str, own: bool, installed: Path
) -> None:
    """Its packages and modules, and those of its namespace; not what is installed beside it."""
    assert is_own(module, installed / file) is own


def test_what_is_installed_is_looked_through_once(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many modules an application has handlers in: with 300 distributions each took a second."""
    looks: list[object] = []
    distributions = importlib.metadata.distributions

    def counted(**options: object) -> object:
        looks.append(options)
        return distributions(**options)

    monkeypatch.setattr(importlib.metadata, "distributions", counted)
    importlib.import_module("homes_library")
    for number in range(20):
        homes_of(f"homes_library.jobs{number}")
    assert len(looks) == 1


@pytest.mark.large
def test_a_module_that_python_runs_belongs_to_its_package(installed: Path) -> None:
    """Under `python -m shop.relay` the module is called `__main__`, and the package around it is the application."""
    (installed / "homes_shop" / "relay.py").write_text(
        textwrap.dedent("""\
        from outboxq.execution.failure import homes_of
        print(*homes_of(__name__))
        """)
    )
    environment = {"PYTHONPATH": str(installed)}
    run = subprocess.run(
        [sys.executable, "-m", "homes_shop.relay"], capture_output=True, check=True, text=True, env=environment
    )
    assert f"{installed}/homes_shop/" in run.stdout.split()
    assert f"{installed}/homes_core/" in run.stdout.split()
