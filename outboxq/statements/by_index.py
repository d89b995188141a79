"""Settings of a transaction with which the planner walks indexes instead of scanning the table.

Statistics, or a stored plan, may come from a time when the table was empty. `NO_SCANS` forbids sequential scans,
`BY_INDEX` also forbids sorts. A statement that must sort uses only `NO_SCANS`: with `BY_INDEX` its sort would get such
a high cost that the server would compile the plan (JIT), which takes long.
"""

from typing import LiteralString

NO_SCANS: LiteralString = "SET LOCAL enable_seqscan = off"
# Without statistics, sorting all rows of a condition may seem as cheap as a walk to the first ones.
BY_INDEX: tuple[LiteralString, ...] = (NO_SCANS, "SET LOCAL enable_sort = off")
# The server plans a named statement once, for any parameters.
PLANNED_ONCE: LiteralString = "SET LOCAL plan_cache_mode = force_generic_plan"
SCANS_AGAIN: LiteralString = "SET LOCAL enable_seqscan TO DEFAULT"
# For the remaining transaction, which handlers share.
AS_EVERYWHERE: tuple[LiteralString, ...] = (SCANS_AGAIN, "SET LOCAL enable_sort TO DEFAULT")
