"""The mutation check stays able to run: each text that it replaces stands where it looks for it."""

import pytest

from tests.faults.mutation_check import MUTANTS, PAGE, ROOT, Mutant, page


@pytest.mark.first_and_last
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_still_fits_the_code(mutant: Mutant) -> None:
    """Its text stands once in its file, and its tests exist: files, or functions in them."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_the_page_lists_the_mutants_of_today() -> None:
    """If not: `python -m tests.faults.mutation_check --page`."""
    text = PAGE.read_text()
    assert page(text) == text
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
