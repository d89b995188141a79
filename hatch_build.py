"""The long description of the package: README.md, without links that lead nowhere on a package index.

With a `Source` in `[project.urls]` relative links become absolute ones, below that address. Without one they become
text: the document's name stays, as it is found in the source distribution, and an image leaves its description.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# [text](target) and ![text](target), but for targets that are addresses, or sections of the same page.
_RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


class LongDescription(MetadataHookInterface):
    """Sets `readme`, which `pyproject.toml` says is dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the long description to the metadata of the project."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text, source)}


def without_relative_links(text: str, source: str | None) -> str:
    """`text` with every relative link made absolute below `source`, or made text if there is no `source`."""

    def replace(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        if source is not None:
            return f"{image}[{label}]({source.rstrip('/')}/{target})"
        return label if image or label == target else f"{label} (`{target.partition('#')[0]}`)"

    return _RELATIVE_LINK.sub(replace, text)
