"""The pages of kinds: the outcomes of each kind's jobs, and the relays that have a handler for the kind."""

from dataclasses import dataclass

from outboxq.admin.browse import Found, find_dead
from outboxq.admin.dead_letters import DeadFilter
from outboxq.admin.flow import list_paused_kinds
from outboxq.admin.history import read_history
from outboxq.admin.relays import list_relays
from outboxq.admin.snapshot import find_dead_groups
from outboxq.admin.stats import collect_stats
from outboxq.dashboard.parameters import Name, Period
from outboxq.dashboard.view import Look, View
from outboxq.dashboard.views.history import failed, series_in, span_of
from outboxq.dashboard.views.seen import seen_dead, seen_groups, seen_relays


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedKinds:
    """The parameter of the list of kinds: the period in which jobs are counted."""

    period: Period = "1h"


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedKind:
    """The parameters of one kind's page: the kind, and how far back its charts go."""

    kind: Name
    period: Period = "1h"


def show_kinds(look: Look, asked: AskedKinds) -> View:
    """Return the list of kinds.

    The list has the kinds that had a job in the period, that a relay or the registry knows, that are paused, or whose
    jobs were postponed because no relay knows them.
    """
    span = span_of(asked.period)
    history = look.at("the history", lambda c: read_history(c, since=span.back, by="kind")) or []
    stats = look.at("the kinds that no relay knows", collect_stats)
    paused = look.at("the kinds that are paused", list_paused_kinds) or []
    relays = look.at("relays", list_relays) or []
    known = {kind for relay in relays if relay.state != "dead" for kind in relay.kinds} | set(look.kinds.names)
    quiet = sorted(known - {row.kind for row in history})
    data = {
        "kinds": sorted(history, key=lambda row: (row.kind or "", row.queue or "")),
        "quiet": quiet,
        "parked_kinds": () if stats is None else stats.parked_kinds,
        "paused_kinds": paused,
        "unhandled": sorted({row.kind for row in history if row.kind and look.kinds.lacks(row.kind)}),
    }
    return View("kinds.html", "Kinds", data, {"period": asked.period, "failed": failed})


def show_kind(look: Look, asked: AskedKind) -> View:
    """Return the page of one kind: the outcomes of its jobs, its relays, and its dead letters."""
    name, span = asked.kind, span_of(asked.period)
    history = look.at("the history", lambda c: read_history(c, kind=name, since=span.back, by=span.by)) or []
    queues = look.at("its queues", lambda c: read_history(c, kind=name, since=span.back, by="kind")) or []
    relays = look.at("relays", list_relays) or []
    groups = look.at("dead letters", find_dead_groups) or []
    dead = look.at("the latest dead letters", lambda c: find_dead(c, DeadFilter(kind=name), limit=10, depth=10_000))
    data = {
        "kind": name,
        "doc": look.kinds.doc(name),
        "no_handler": look.kinds.lacks(name),
        "history": history,
        "queues": queues,
        "relays": seen_relays(look, [each for each in relays if name in each.kinds and each.state != "dead"]),
        "dead_groups": seen_groups(look, [each for each in groups if each.kind == name]),
        "dead": seen_dead(look, (dead or Found(())).rows),
        "paused_kinds": [each for each in look.at("pauses", list_paused_kinds) or [] if each.kind == name],
    }
    extra = {"series": series_in(history, look.now, span), "period": asked.period, "failed": failed}
    return View("kind.html", name, data, extra)
