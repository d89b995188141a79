"""What MkDocs does besides building `docs/`: the README and other pages of the repository join the site.

They keep their places, so that links in the sources work on a code host; here each link is led to the page of the site.
A link to a file that is no page, such as a source, becomes its path.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s]+)\)")
FENCED = re.compile(r"^( *)(```+).*?^\1\2`*\s*$", re.MULTILINE | re.DOTALL)

# The pages of the site that are not in docs/, by their place in the repository.
OUTSIDE = {name: name.lower() for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
for path in sorted(ROOT.glob("examples/**/README.md")):
    folder = path.parent.relative_to(ROOT).as_posix()
    OUTSIDE[f"{folder}/README.md"] = f"{folder}.md" if "/" in folder else f"{folder}/index.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation's entry for the examples: one page for each that there is."""
    for entry in config.nav or []:
        if "Examples" in entry:
            entry["Examples"] = [page for page in OUTSIDE.values() if page.startswith("examples/")]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Lead the links of a page to the pages of the site."""
    here = page.file.src_uri
    source = {page: source for source, page in OUTSIDE.items()}.get(here, f"docs/{here}")
    parts, place = [], 0
    for fence in FENCED.finditer(markdown):
        parts += [_led(markdown[place : fence.start()], source, here), fence[0]]
        place = fence.end()
    return "".join([*parts, _led(markdown[place:], source, here)])


def _led(text: str, source: str, here: str) -> str:
    return LINK.sub(lambda link: _link(link, source, here), text)


def _link(link: re.Match[str], source: str, here: str) -> str:
    image, shown, target = link.groups()
    path, hash_, anchor = target.partition("#")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if found in OUTSIDE:
        inside = OUTSIDE[found]
    elif found.startswith("docs/") and not (ROOT / found).is_dir():
        inside = found.removeprefix("docs/")
    else:
        # A source file or a folder: shown by its name, if it is there.
        return shown if (ROOT / found).exists() else link[0]
    return f"{image}[{shown}]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}{hash_}{anchor})"
