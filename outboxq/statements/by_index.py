"""Settings for statements that go by indexes: the table may have been empty when its statistics, or a plan, were made.

A sort that cannot be avoided costs so much under `BY_INDEX` that the server would compile the plan: such statements
take `NO_SCANS` alone.
"""

from typing import LiteralString

NO_SCANS: LiteralString = "SET LOCAL enable_seqscan = off"
# Without statistics, all rows of a condition may look as cheap to sort as the first ones to walk to.
BY_INDEX: tuple[LiteralString, ...] = (NO_SCANS, "SET LOCAL enable_sort = off")
SCANS_AGAIN: LiteralString = "SET LOCAL enable_seqscan TO DEFAULT"
# For the rest of a transaction that handlers share.
AS_EVERYWHERE: tuple[LiteralString, ...] = (SCANS_AGAIN, "SET LOCAL enable_sort TO DEFAULT")
