"""Settings under which a relay claims several jobs at once, in either mode."""


def together(claim: str, number: int) -> dict[str, int]:
    """Up to `number` jobs: in one transaction of one slot, or, under a lease, each for a slot of its own."""
    return {"slots_per_queue": number} if claim == "lease" else {"slots_per_queue": 1, "batch_size": number}
