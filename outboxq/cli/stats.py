"""`outboxq stats`."""

from outboxq.cli.options import DatabaseOptions, takes
from outboxq.cli.output import notice, print_json, print_rows
from outboxq.codec.text import several


@takes(DatabaseOptions)
def stats(options: DatabaseOptions) -> None:
    """Count the jobs that wait, run and died, per queue.

    The states are those of `outboxq jobs list`. Parked jobs, which are also counted as scheduled or due, were postponed
    because no relay that saw them knows their kind: start one that does. Effects whose outcome is unknown are counted
    too. Reads the whole table of jobs.

    \b
    Example:
      outboxq stats --json | jq '.queues[] | select(.dead > 0)'
    """
    from outboxq.admin.jobs import STATES
    from outboxq.admin.stats import collect_stats

    with options.transaction() as connection:
        found = collect_stats(connection)
    if options.as_json:
        print_json(found)
        return
    columns = ("queue", *STATES, "parked", "dead", "oldest_waiting_seconds", "paused_at")
    print_rows(columns, found.queues)
    if found.parked_kinds:
        kinds = ("queue", "kind", "jobs", "next_look_at")
        print_rows(kinds, found.parked_kinds, title="Kinds that no relay knows:")
    if found.unknown_effects:
        effects = several(found.unknown_effects, "effect waits", "effects wait")
        notice(f"{effects} for an operator: see `outboxq effects list --status unknown`")
