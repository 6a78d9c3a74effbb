"""The site's pages beside those of docs/, and where links lead there: a hook of mkdocs.

README, CHANGELOG, CONTRIBUTING and SECURITY lie at the root of the repository, where its host shows them. They become pages.
A link to a file that the site has not, as to an example, leads to the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages that lie at the root of the repository, and their places on the site."""
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))|(?<=\]: )\S+$", re.M)
"""The targets of links in a line, and those of `[...]` links."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the root."""
    from mkdocs.structure.files import File

    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Have the links of a page lead to pages of the site where there are such, else to the repository."""
    place = page.file.src_uri
    return LINK.sub(lambda found: target_on_site(found[0], place, config["repo_url"]), markdown)


def target_on_site(target: str, place: str, repository: str) -> str:
    """The target of a link on the site. place: of the page that has it, below docs/."""
    raw = repository.replace("github.com", "raw.githubusercontent.com") + "/main/"
    ours = next(
        (
            each
            for each in (f"{repository}/blob/main/", f"{repository}/tree/main/", raw)
            if target.startswith(each)
        ),
        None,
    )
    if (ours is None and "://" in target) or target.startswith("#"):
        return target
    file, mark, anchor = target.removeprefix(ours or "").partition("#")
    on_root = next((name for name, page in FROM_ROOT.items() if page == place), None)
    if ours is None and on_root is None:
        file = posixpath.normpath(posixpath.join("docs", posixpath.dirname(place), file))
    if file in FROM_ROOT:
        shown = FROM_ROOT[file]
    elif file.startswith("docs/") and (ROOT / file).is_file():
        shown = file.removeprefix("docs/")
    else:
        kind = "tree" if (ROOT / file).is_dir() else "blob"
        return f"{repository}/{kind}/main/{file}{mark}{anchor}"
    return posixpath.relpath(shown, posixpath.dirname(place) or ".") + mark + anchor
