"""The documentation site: every page has its place, every public name its entry, and links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import hf_paged

ROOT = Path(__file__).parent.parent
SITE = ROOT / "scripts" / "site"
REPOSITORY = "https://github.com/a/b"


class Loader(yaml.SafeLoader):
    """YAML with mkdocs' names of functions, which are not called here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
PAGES = run_path(str(SITE / "pages.py"))


def places(nav: list[Any]) -> list[str]:
    """The pages of a navigation, in the reader's order."""
    found: list[str] = []
    for entry in nav:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        found += [value] if isinstance(value, str) else places(value)
    return [place for place in found if "://" not in place]


def test_every_page_has_its_place() -> None:
    docs = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(places(CONFIG["nav"])) == sorted([*docs, *PAGES["FROM_ROOT"].values()])


def test_it_is_built_strictly_and_asks_no_other_host() -> None:
    assert CONFIG["strict"] is True
    assert set(CONFIG["validation"].values()) == {"warn"}
    assert CONFIG["theme"]["font"] is False
    assert "search" in CONFIG["plugins"]


def test_every_public_name_has_its_entry() -> None:
    """The reference shows what `import hf_paged` gives."""
    page = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: (hf_paged\S*)\n(?:    options:\n      heading: (\S+)\n)?", page, re.M)
    names = {(heading or path).removeprefix("hf_paged.") for path, heading in shown}
    assert set(hf_paged.__all__) <= names


@pytest.mark.parametrize(
    ("target", "place", "found"),
    [
        (f"{REPOSITORY}/blob/main/docs/engine.md#a", "index.md", "engine.md#a"),
        ("docs/internals/kv.md", "contributing.md", "internals/kv.md"),
        ("CHANGELOG.md", "index.md", "changelog.md"),
        ("https://raw.githubusercontent.com/a/b/main/docs/speed.svg", "index.md", "speed.svg"),
        ("../README.md", "engine.md", "index.md"),
        ("engine.md", "internals/kv.md", "engine.md"),
        ("../contract.md#prefix-cache", "internals/kv.md", "../contract.md#prefix-cache"),
        ("../examples/rollouts.py", "trl.md", f"{REPOSITORY}/blob/main/examples/rollouts.py"),
        ("examples", "index.md", f"{REPOSITORY}/tree/main/examples"),
        ("#limits", "serving.md", "#limits"),
        ("https://semver.org/", "changelog.md", "https://semver.org/"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository(target: str, place: str, found: str) -> None:
    assert PAGES["target_on_site"](target, place, REPOSITORY) == found


def test_both_forms_of_links_are_led() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    text = f"[a](CHANGELOG.md), ![b](docs/speed.svg) and [c].\n\n[c]: {REPOSITORY}/blob/main/docs/ray.md\n"
    led = PAGES["on_page_markdown"](text, page, {"repo_url": REPOSITORY}, None)
    assert led == "[a](changelog.md), ![b](speed.svg) and [c].\n\n[c]: ray.md\n"


def test_parameters_become_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    with_list = run_path(str(SITE / "docstrings.py"))["with_list"]
    text = """Queue a request.

    prompt: a text, or
        ids: of tokens. seed: of its draws; salt, tenant: whose it is.

    It ends: at last.
    """
    assert with_list(text, ["prompt", "seed", "salt", "tenant", "ends"]).split("\n\n") == [
        "Queue a request.",
        "- **`prompt`**: a text, or ids: of tokens.\n- **`seed`**: of its draws;\n- **`salt, tenant`**: whose it is.",
        "It ends: at last.",
    ]
    assert with_list("Nothing to list: here.", []) == "Nothing to list: here."
