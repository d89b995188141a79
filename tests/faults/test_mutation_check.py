"""The mutation check stays able to run: each text that it replaces stands where it looks for it."""

import re

import pytest

from tests.faults.mutation_check import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_still_fits_the_code(mutant: Mutant) -> None:
    """Its text stands once in its file, and its tests exist: files, or functions in them."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_the_page_names_each_mutant_once() -> None:
    """`docs/mutants.md` lists the mutants of each file by their names, and says how many there are."""
    page = (ROOT / "docs/mutants.md").read_text()
    rows = re.findall(r"^- `(.+?)`: (.+(?:\n  .+)*)", page, re.MULTILINE)
    listed = [(file, name) for file, names in rows for name in " ".join(names.split()).split("; ")]
    assert sorted(listed) == sorted((mutant.file, mutant.name) for mutant in MUTANTS)
    assert f"There are {len(MUTANTS)}." in page
