"""The mutation check stays able to run: each text that it replaces stands where it looks for it."""

import pytest

from tests.faults.mutation_check import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_still_fits_the_code(mutant: Mutant) -> None:
    """Its text stands once in its file, and its tests exist: files, or functions in them."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_the_table_of_the_proof_names_each_mutant() -> None:
    """`docs/proof.md` says what each mutant takes out, in the same words."""
    table = (ROOT / "docs/proof.md").read_text().partition("## Taking the mechanisms out")[2]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]
    assert sorted(rows[1:]) == sorted(mutant.name for mutant in MUTANTS)
