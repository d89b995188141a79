"""Pages taken apart: their tags and attributes, and those that should not be there."""

import re
from html.parser import HTMLParser

_ALLOWED_TAGS = {
    "html", "head", "meta", "title", "link", "script", "body", "a", "header", "nav", "span", "img", "ul", "li",
    "button", "main", "div", "h1", "h2", "p", "table", "caption", "thead", "tbody", "tr", "th", "td", "small",
    "strong", "time", "code", "dl", "dt", "dd", "pre", "details", "summary", "figure", "svg", "path", "rect",
    "polyline", "ol", "section", "form", "input", "label", "select", "option", "dialog", "kbd", "template", "progress",
    "br", "noscript", "textarea",
}  # fmt: skip


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _ALLOWED_TAGS:
            self.problems.append(f"<{tag}>")
        for name, value in attrs:
            if name.startswith("on") or name in ("style", "srcdoc"):
                self.problems.append(f"{tag} {name}={value}")
            if name in ("href", "src", "action"):
                if name == "href":
                    self.links.append(value or "")
                if re.match(r"\s*(?:[a-z]+:|//)", value or "", re.IGNORECASE):
                    self.problems.append(f"{tag} {name}={value}")
