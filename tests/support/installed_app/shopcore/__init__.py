"""Another top-level package of the same distribution."""


def check(card: str) -> None:
    raise ValueError(f"card {card} was refused")
