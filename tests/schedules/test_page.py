"""docs/schedules.md: its table of the days on which the clocks change is what happens."""

import re
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from outboxq.cron import SHORTHANDS, Cron
from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "schedules.md").read_text()
BERLIN = ZoneInfo("Europe/Berlin")
# Between one and four at night.
FROM, TO = timedelta(minutes=45), timedelta(hours=4, minutes=15)


def times_of(text: str, day: datetime) -> str:
    """The times of a day that are due at night, as the page writes them."""
    cron = Cron(text, "Europe/Berlin")
    begin = day.astimezone(UTC)
    first = cron.after(begin + FROM)
    due = cron.due_times(first, day.replace(hour=4, minute=15).astimezone(UTC), 100)
    shown = [cron.local(each) for each in due if each <= day.replace(hour=4, minute=15).astimezone(UTC)]
    return ", ".join(each.strftime("%H:%M") + each.strftime("%z")[:3] + ":" + each.strftime("%z")[3:] for each in shown)


def test_the_table_of_changing_clocks_is_what_happens() -> None:
    """In spring and in autumn, for a time of the day and for times of each hour."""
    heading, *rows = re.findall(
        r"^\| (`.*?) \| (.*?) \| (.*?) \|$", PAGE.partition("## When the clocks change")[2], re.MULTILINE
    )
    days = [datetime.fromisoformat(cell.partition(",")[0]).replace(tzinfo=BERLIN) for cell in heading[1:]]
    table = {text.strip("`"): cells for text, *cells in rows if text.count("*") > 1}
    assert sorted(table) == ["*/30 2 * * *", "0 * * * *", "30 2 * * *"]
    for text, cells in table.items():
        assert cells == [times_of(text, day) or "none" for day in days], text


def test_the_page_names_every_shorthand() -> None:
    """`@daily` and the others."""
    assert [name for name in SHORTHANDS if f"`{name}`" not in PAGE] == []
