"""A walk through the pages of a dashboard: the links of every page that lead to it."""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from playwright.sync_api import Page

from outboxq.dashboard.routes import ACTIONS

VERBS = {action.path.rpartition("/")[2] for action in ACTIONS}


@dataclass
class Crawl:
    """Pages that were seen, and those that are still to be.

    Attributes:
        root: Where the dashboard is; links to elsewhere are collected and not followed.
        inside: Links of pages that are not below this are not followed.
        most: More pages than that are not opened.
        most_forms: Of forms with the same verb, such as `retry`, more than that are not opened.
        one_in: Of the links that are found, one in so many is opened, drawn by its address: pages of one thing each
            are alike but for its texts, and a list has as many as there are texts.
    """

    root: str
    inside: str
    most: int = 2_000
    most_forms: int = 4
    one_in: int = 3
    seen: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    _forms: Counter[str] = field(default_factory=Counter)

    def walk(self, page: Page, start: Iterable[str]) -> Iterator[str]:
        """Open these paths and all that they lead to; each address, while its page is shown."""
        todo = [f"{self.root}{path}" for path in start]
        while todo and len(self.seen) < self.most:
            address = todo.pop(0)
            if address in self.seen or self._is_one_form_more(address):
                continue
            self.seen.add(address)
            page.goto(address)
            yield address
            if address.startswith(self.inside):
                todo += [link for link in self._links(page) if self._is_drawn(link) and not _repeats(address, link)]

    def _is_drawn(self, link: str) -> bool:
        return zlib.crc32(link.removeprefix(self.root).encode()) % self.one_in == 0

    def _is_one_form_more(self, address: str) -> bool:
        verb = address.partition("?")[0].rpartition("/")[2]
        if verb not in VERBS:
            return False
        self._forms[verb] += 1
        return self._forms[verb] > self.most_forms

    def _links(self, page: Page) -> Iterator[str]:
        found: list[str] = page.eval_on_selector_all("a[href]", "links => links.map(link => link.href.split('#')[0])")
        for link in found:
            if link.startswith(f"{self.root}/"):
                yield link
            else:
                self.foreign.add(link)


def _repeats(address: str, link: str) -> bool:
    """Whether a link leads to the same list with one more filter: there is no end to those."""
    return "?" in link and ("?" in address or "period=" in link or "refresh=" in link)
