"""Settings are refused where they enter, with what was expected and what came."""

import math

import pytest

from outboxq import Context, Jobs, RelayConfig, SlotGroup
from outboxq.errors import ConfigError, RegistryError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lease_seconds": 0.5}, "lease_seconds takes 1 to 3600, got 0.5"),
        ({"lease_seconds": -1}, "lease_seconds takes 1 to 3600, got -1"),
        ({"lease_seconds": math.nan}, "lease_seconds takes 1 to 3600, got nan"),
        ({"lease_seconds": 9, "heartbeat_seconds": 4}, "to a third of lease_seconds=9.*got 4: raise lease_seconds"),
        ({"heartbeat_seconds": 0}, "heartbeat_seconds takes 0.05 to a third"),
        ({"heartbeat_seconds": -1}, "heartbeat_seconds takes 0.05 to a third"),
        ({"max_crashes": 0}, "max_crashes takes 1 to 1000, got 0"),
        ({"drain_seconds": -1}, "drain_seconds takes 0 to 86400, got -1"),
        ({"poll_seconds": math.nan}, "poll_seconds takes 0.01 to 3600, got nan"),
        ({"stats_seconds": 0.5}, "stats_seconds takes 1 to 3600, or 0 for never, got 0.5"),
        ({"prune_seconds": 0.5}, "prune_seconds takes 1 to 86400, or 0 for never, got 0.5"),
        ({"prune_seconds": 86_401}, "prune_seconds takes 1 to 86400, or 0 for never, got 86401"),
        ({"prune_seconds": -1}, "prune_seconds takes 1 to 86400"),
        ({"prune_seconds": math.nan}, "prune_seconds takes 1 to 86400, or 0 for never, got nan"),
        ({"batch_size": 0}, "batch_size takes 1 to 1000, got 0"),
        ({"batch_size": "4"}, "batch_size takes 1 to 1000, got '4'"),
        ({"prune_seconds": "4"}, "prune_seconds takes 1 to 86400, or 0 for never, got '4'"),
        ({"groups": ("a=4",)}, r"groups takes SlotGroups, got the text 'a=4': SlotGroup.parse\('a=4'\)"),
        ({"groups": "a=4"}, "groups takes a tuple, such as"),
        ({"groups": SlotGroup(("a",), 4)}, "groups takes a tuple, such as"),
        (
            {"groups": (("a", 4),)},
            r"groups takes SlotGroups, such as .*got \('a', 4\)",
        ),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], said: str) -> None:
    """A lease that one late beat would lose, negative times, no number at all, a text for a group of slots."""
    with pytest.raises(ConfigError, match=said):
        RelayConfig(**settings)  # type: ignore[arg-type]


def test_the_queues_of_a_group_are_a_tuple() -> None:
    """A text would be queues of one letter each."""
    with pytest.raises(ConfigError, match=r"got the text: SlotGroup\(\('mail',\)\)"):
        SlotGroup("mail")  # type: ignore[arg-type]


def test_pruning_can_be_turned_off() -> None:
    """0 is never."""
    assert RelayConfig(prune_seconds=0).prune_seconds == 0
    assert RelayConfig(stats_seconds=0).stats_seconds == 0


def test_the_heartbeat_follows_the_lease() -> None:
    """Six beats a lease unless said otherwise, so that five may be late."""
    assert RelayConfig().beat_seconds == 5.0
    assert RelayConfig(lease_seconds=3).beat_seconds == 0.5
    assert RelayConfig(lease_seconds=3, heartbeat_seconds=1).beat_seconds == 1


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "30", True, 8 * 86_400])
def test_a_deadline_is_a_positive_number_of_seconds(seconds: object) -> None:
    """Up to a week; None is how to say that there is none."""

    def nothing(ctx: Context) -> None: ...

    with pytest.raises(RegistryError, match=r"timeout_seconds takes 0.001 to 604,800, or None for no deadline, got"):
        Jobs().handler(timeout_seconds=seconds)(nothing)  # type: ignore[arg-type]


def test_the_deadline_of_a_queue_is_its_longest() -> None:
    """What the claim sets for its transaction must let every handler of the queue run; none means none."""
    jobs = Jobs()

    @jobs.handler(queue="mixed", timeout_seconds=3)
    def quick(ctx: Context) -> None: ...

    @jobs.handler(queue="mixed", timeout_seconds=30)
    def slow(ctx: Context) -> None: ...

    @jobs.handler(queue="endless", timeout_seconds=3)
    def ends(ctx: Context) -> None: ...

    @jobs.handler(queue="endless", timeout_seconds=None)
    def endless(ctx: Context) -> None: ...

    registry = jobs.resolve()
    assert registry.timeout_seconds("mixed") == 30
    assert registry.timeout_seconds("endless") is None
