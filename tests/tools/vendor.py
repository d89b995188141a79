"""Compare files of other projects, in the dashboard and its tests, with their packages on npm, or fetch them anew."""

import argparse
import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
DIRECTORIES = (_ROOT / "outboxq" / "dashboard" / "static" / "vendor", _ROOT / "tests" / "dashboard" / "vendor")

_HELP = """\
examples:
  python -m tests.tools.vendor            # end with 1 if a file is not that of its package
  python -m tests.tools.vendor --write    # write the files of the versions in vendor.toml

Needs npm, whose `npm pack` fetches the packages. A new version is written into vendor.toml by hand."""


def problems(here: Path, package: dict[str, Any], *, write: bool) -> Iterator[str]:
    """What differs from the package as npm has it."""
    with tempfile.TemporaryDirectory() as directory:
        wanted = f"{package['name']}@{package['version']}"
        packed = subprocess.run(
            ["npm", "pack", "--silent", wanted], cwd=directory, check=True, capture_output=True, text=True
        )
        archive = Path(directory) / packed.stdout.strip().splitlines()[-1]
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if integrity != package["integrity"]:
            yield f"{wanted}: its integrity is {integrity}"
        with tarfile.open(archive) as opened:
            for each in package["file"]:
                member = opened.extractfile(f"package/{each['path']}")
                assert member is not None
                content = member.read()
                if write:
                    (here / each["name"]).write_bytes(content)
                if hashlib.sha256(content).hexdigest() != each["sha256"]:
                    yield f"{each['name']}: the sha256 of the package's file is {hashlib.sha256(content).hexdigest()}"
                if (here / each["name"]).read_bytes() != content:
                    yield f"{each['name']}: the file differs from {wanted}"


def main() -> int:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=_HELP, formatter_class=formatter)
    parser.add_argument("--write", action="store_true", help="write the files")
    write = parser.parse_args().write
    found = [
        problem
        for here in DIRECTORIES
        for package in tomllib.loads((here / "vendor.toml").read_text())["package"]
        for problem in problems(here, package, write=write)
    ]
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
