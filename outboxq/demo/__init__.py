"""The demo: a small shop on a PostgreSQL server of its own, and a relay that is killed in the middle of its work.

`outboxq.demo.shop` is the application, as a user would write it; `proof` counts in the database what became of it.
"""

__all__ = ["DEFAULT_JOBS", "run_demo"]

DEFAULT_JOBS = 1_000


def run_demo(*, jobs: int = DEFAULT_JOBS, seed: int | None = None, json: bool = False) -> int:
    """Play the demo and print its proof.

    It starts a server and three relay processes, and leaves nothing behind, also after Ctrl-C. No configured database
    is touched.

    Args:
        jobs: How many jobs are committed, give or take two; at least 100.
        seed: Repeats the customers of an earlier run; None draws one.
        json: Print one JSON object instead of progress and a table.

    Returns:
        0 if the proof holds, 1 if it does not, 130 after Ctrl-C.

    Raises:
        ConfigError: too few jobs, or rich is not installed.
        DemoFailed: a relay did not start, or ended by itself.
        PostgresUnavailable: the embedded server does not run here.
    """
    from outboxq.demo.story import play

    return play(jobs=jobs, seed=seed, as_json=json)
