"""The pages: links lead somewhere, cited files exist, and the prose keeps the house's register."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *(ROOT / "docs").rglob("*.md")])
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
OURS = (f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/tree/main/", f"{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')}/main/")  # fmt: skip
"""How links begin that lead to a file of this repository from anywhere."""
DEFINITION = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.M)
"""The target of all links `[...]` of a page."""
TABLES = {"engine_models.md", "families.md", "models.md"}
"""Pages that scripts write from measurements: mostly errors of models and of transformers."""
RECORDS = {"CHANGELOG.md", "benchmarks.md"}
"""Pages that keep what was said on a date."""
GUIDES = [page for page in PAGES if page.name not in RECORDS | TABLES]
MOST_WORDS = 20
LONGEST = {"docs/design.md": 120, "docs/engine.md": 199, "README.md": 199}
"""The most lines of a page."""
LOCAL = (
    r"crew|roster|muster\w*|shelf|shelves|strides?|custody|seats?|trail|siblings?|contest|onlookers?"
    r"|lookout|bid|whoever|nobody|somebody|everybody|newcomers?"
)
"""Words that only this project knew, and words for people."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _prose(page: Path) -> str:
    """A page without its code, tables and headings; every inline code is one word."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    text = DEFINITION.sub("", text)
    text = re.sub(r"^\s*[|#].*$", "\n", text, flags=re.M)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.M)


def _sentences(page: Path) -> list[list[str]]:
    pieces = re.split(r"(?<=[.?!])[*_)\"]*\s+|\n\s*\n", _prose(page))
    return [piece.split() for piece in pieces if len(piece.split()) > 2]


def _targets(page: Path) -> list[str]:
    """Where the links of a page lead, its pictures among them."""
    text = page.read_text()
    return re.findall(r"\]\(([^)\s]+)\)", text) + [target for _, target in DEFINITION.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _targets(page):
        root = next((each for each in OURS if target.startswith(each)), None)
        if root is None and "://" in target:
            continue
        file, _, anchor = target.removeprefix(root or "").partition("#")
        linked = (ROOT if root else page.parent) / file if file else page
        assert linked.exists(), f"{page.name} links to {target}, and there is no {file}"
        assert not anchor or anchor in _anchors(linked), f"{page.name} links to {target}: no such heading"


def test_the_readme_is_read_elsewhere() -> None:
    """A package index shows it, where a path of the repository leads nowhere; every `[...]` has its target."""
    readme = (ROOT / "README.md").read_text()
    assert [target for target in _targets(ROOT / "README.md") if "://" not in target] == []
    prose = re.sub(r"```.*?```|`[^`]*`", "", readme, flags=re.S)
    named = re.findall(r"(?<!!)\[([^\]]+)\](?![(:])", prose)
    assert set(named) == {name for name, _ in DEFINITION.findall(readme)}
    assert len(named) > 10


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_cited_files_exist(page: Path) -> None:
    """Paths between backticks are those of the repository or of the package."""
    cited = re.findall(r"`((?:[\w.]+/)+(?:\w+\.\w+)?)`", page.read_text())
    missing = [
        path for path in cited if not any((base / path).exists() for base in (ROOT, ROOT / "hf_paged"))
    ]
    assert not missing


def test_the_map_names_its_files() -> None:
    """Both paths of a token have file names and fit on a screen each."""
    text = (ROOT / "docs" / "design.md").read_text()
    for front in ("generate()", "the engine"):
        walk = text.split(f"## The path of a token through {front}\n")[1].split("\n\n")[0]
        assert len(walk.splitlines()) <= 24
        assert len(set(re.findall(r"\w+/\w+\.py", walk))) >= 7


@pytest.mark.parametrize(("page", "lines"), LONGEST.items())
def test_pages_stay_short(page: str, lines: int) -> None:
    assert len(DEFINITION.sub("", (ROOT / page).read_text()).strip().splitlines()) <= lines


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_sentences_are_short(page: Path) -> None:
    lengths = [len(sentence) for sentence in _sentences(page)]
    assert sum(lengths) / len(lengths) < MOST_WORDS


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_words_are_those_of_the_field(page: Path) -> None:
    assert not re.findall(rf"\b(?:{LOCAL})\b", _prose(page), re.I)


def test_the_chart_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are those of docs/benchmarks.md; `python benchmarks/chart.py` draws it anew."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    chart = importlib.import_module("chart")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    drawn = chart.draw(page)
    assert drawn == (ROOT / "docs" / "speed.svg").read_text()
    assert "docs/speed.svg" in (ROOT / "README.md").read_text()
    assert drawn != chart.draw(page.replace("| 20.83 |", "| 20.84 |"))
    with pytest.raises(SystemExit, match="expected one figure"):
        chart.draw(page.replace("| 1 row | 20.83 |", "| one row | 20.83 |"))


def test_readme_counts_what_the_sweep_counted() -> None:
    """The figures of README are those at the head of docs/models.md."""
    head = (ROOT / "docs" / "models.md").read_text().split("\n## ")[0]
    counted = dict(re.findall(r"^\| (.+?) \| ([\d,]+) \|$", head, re.M))
    families, same = counted["families that run"], counted["answers that are the same"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{families} families run, {same} answers are the same and none differs" in readme
    assert counted["answers that differ, or that only the paged call fails to give"] == "0"
