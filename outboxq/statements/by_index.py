"""Settings for statements that use indexes: the table may have been empty when its statistics, or a plan, were made.

Under `BY_INDEX` a sort that cannot be avoided costs so much that the server would compile the plan: such statements
take `NO_SCANS` alone.
"""

from typing import LiteralString

NO_SCANS: LiteralString = "SET LOCAL enable_seqscan = off"
# Without statistics, a sort of all rows of a condition may seem as cheap as a walk to the first ones.
BY_INDEX: tuple[LiteralString, ...] = (NO_SCANS, "SET LOCAL enable_sort = off")
# The server plans a statement that is executed by its name once, for any parameters.
PLANNED_ONCE: LiteralString = "SET LOCAL plan_cache_mode = force_generic_plan"
SCANS_AGAIN: LiteralString = "SET LOCAL enable_seqscan TO DEFAULT"
# For the rest of a transaction that handlers share.
AS_EVERYWHERE: tuple[LiteralString, ...] = (SCANS_AGAIN, "SET LOCAL enable_sort TO DEFAULT")
