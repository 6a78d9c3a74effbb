"""The rows of a sweep in words: a line each, a summary on one screen, and docs/models.md."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from expected import EXPECTED_FILE, expected_paths

PAGED = {"cache_implementation": "paged", "cache_config": {"block_size": 4}}
TITLES = {
    "causal": "Causal language models",
    "seq2seq": "Encoder-decoders over text",
    "image": "Vision-language models",
    "audio": "Audio models",
}
GROUPS = ("paged", "paged beside stock's state", "dense", "stock", "not run")
BAD = ("X", "E", "!")
Row = dict[str, Any]


def group(row: Row) -> str:
    """Under what a row counts: the least of its layers decides."""
    if "unbuilt" in row or set(row["marks"].values()) <= {"-"}:
        return "not run"
    return _group_of(row["path"])


def _group_of(path: str) -> str:
    if not path:
        return "stock"
    if "dense" in path:
        return "dense"
    return "paged beside stock's state" if "stock" in path else "paged"


def complaints(row: Row) -> list[str]:
    """What must not be."""
    return [note for note in row["notes"] if re.match(r"[\w: ]+ [XE!]:", note)]


def lost(row: Row) -> str:
    """What the row's path was, if it was better than now: other releases lay other layers out, and that is no
    loss.
    """
    before = expected_paths().get(f"{row['kind']} {row['family']}", "") if EXPECTED_FILE.exists() else ""
    worse = GROUPS.index(group(row)) > GROUPS.index(_group_of(before)) or _paged_layers(
        row["path"]
    ) < _paged_layers(before)
    return before if before and worse and group(row) != "not run" else ""


def _paged_layers(path: str) -> int:
    return sum(int(number) for number in re.findall(r"(\d+) \w+ paged", path))


def line(row: Row, details: bool = False) -> str:
    """A row for the eye that watches."""
    marks = "".join(row["marks"].values()) or "not built"
    notes = row["notes"] if details else [_last_line(note) for note in complaints(row)]
    why = [" ".join(row.get("unbuilt", "").split())[:200] or row["why"]]
    gone = [f"LOST: it was {lost(row)}"] if lost(row) else []
    dense = row["dense"] if "dense" in row["path"] else ""
    fused = f"{row['fused']} fused launches" if row.get("fused") else ""
    told = [
        entry
        for entry in (row["path"], dense, row["captured"], fused, f"{row['apart']:.0e}", *why, *gone, *notes)
        if entry
    ]
    return f"{row['kind']:8}{row['family']:28}{marks:11} " + " | ".join(told)


def _last_line(note: str) -> str:
    return note.split(":")[0] + ": " + note.strip().splitlines()[-1][:300]


def summary(rows: list[Row]) -> int:
    """Print what the rows add up to; the answer is the exit code."""
    for kind in TITLES:
        counts = Counter(group(row) for row in rows if row["kind"] == kind)
        if counts:
            print(
                f"{TITLES[kind]:32}" + ", ".join(f"{counts[name]} {name}" for name in GROUPS if counts[name])
            )
    marks = Counter(mark for row in rows for mark in row["marks"].values())
    captured = sum(row["captured"] == "yes" for row in rows)
    print(f"captured: {captured} of {sum(bool(row['captured']) for row in rows)}")
    if fused := sum(bool(row.get("fused")) for row in rows):
        print(f"with fused kernels: {fused}")
    print(
        "answers: " + ", ".join(f"{number} {name}" for mark, name in MARKS.items() if (number := marks[mark]))
    )
    bad = [row for row in rows if complaints(row) or lost(row)]
    print(f"bad rows: {', '.join(row['family'] for row in bad) or 'none'}")
    return 1 if bad else 0


MARKS = {
    "=": "the same",
    "~": "the same in float64",
    "t": "that part at a tie",
    "?": "where stock disagrees with itself",
    "-": "that stock cannot give",
    "X": "DIFFERENT",
    "E": "FAILED",
}


def expected(rows: list[Row], others: dict[str, str]) -> str:
    """The file of expected paths. others: those of families that have no rows."""
    known = others | {f"{row['kind']} {row['family']}": row["path"] for row in rows if row["path"]}
    entries = [f'  "{name}": "{path}"' for name, path in sorted(known.items())]
    return "{\n" + ",\n".join(entries) + "\n}\n"


# ---- the page


def page(run: Row, other: Row | None, device: Row | None = None) -> str:
    """docs/models.md."""
    rows = run["rows"]
    parts = [
        HEAD.format(**run, **_totals(rows)),
        *(_table(kind, rows) for kind in TITLES),
        _not_run(rows),
        DEPENDENT,
        QUANTIZED,
    ]
    if other is not None:
        parts.append(_compared(run, other))
    if device is not None:
        parts.append(_on_device(device))
    return "\n".join(parts)


DEPENDENT = """## Rows that are not independent

`tests/test_model_routers.py`: a router with an expert capacity drops tokens beyond it, so a token's result may depend on the others of
its batch. Beams and samples of one prompt are then computed row by row, as stock computes them; the answers are the same. Such routers
are found by a test with as many tokens as the prompt has.

| router | prompts of beams and samples | engine |
|---|---|---|
| NLLB-MoE, `moe_eval_capacity_token_fraction=1.0` (its default): no token is ever dropped | shared | served |
| NLLB-MoE with a smaller fraction, or 0.0 and an `expert_capacity` that all rows together may exceed | row by row | refused |
| NLLB-MoE, `second_expert_policy` "random" or "sampling" | row by row | refused |
| Switch Transformers: counts the tokens of each row | shared | refused where a sequence may exceed its capacity |
| other code that names a capacity | row by row, if it counts beyond a row | refused, if it counts at all |

In transformers 5.17.0 Switch drops nothing, and is served. The tiny NLLB-MoE of the tables above has no sparse layers; the models of
that test have only sparse ones. Steps of such models are not captured, and their prompts share no prefixes.
"""


QUANTIZED = """## Quantized linear layers

`tests/test_quantized.py`, where the packages are installed (`pip install .[quantized]`): a tiny Llama and a tiny Gemma3, alone and with
a LoRA, padded, greedy and beams, against stock. 2026-11-21, torchao 0.18.0, bitsandbytes 0.50.2, transformers 5.17.0, torch 2.13.0, CPU.

| layers | tokens | prefix reuse |
|---|---|---|
| torchao, int8 weights | the same, scores within 2e-4 | yes |
| torchao, int8 weights and activations (a scale for each row) | the same up to ties of that rounding | yes |
| bitsandbytes, int8 (`llm_int8_threshold=0`) | the same up to ties | yes |
| bitsandbytes, int8 with outliers (its default) | the same up to ties | no: a column is exact if any token of the batch is an outlier |
| bitsandbytes, nf4, with and without double quantization | the same up to ties | yes |

A change of the weights or of their scales, in place or by another tensor, is detected by prefix reuse.
"""


MEDIA_TITLE = "## Pictures, videos and recordings"
MEDIA = (
    MEDIA_TITLE
    + """

Made by `python scripts/sweep_media.py --write docs/models.md` on {date} with transformers {transformers}, torch {torch}: a tiny random
model of every class that generates and takes such inputs, in the auto mappings or not. Two prompts of one input each (greedy, beams,
samples, padded, padded beams, hidden states, captured steps), then of two inputs each (greedy, beams, samples, padded, padded beams).
Another picture changes the logits, or it does not count as shown. {classes} classes run: {same:,} answers are the same, {bad} differ,
stock itself cannot give {cannot}."""
)


HEAD = """# Models

Made by `python scripts/sweep_models.py --write docs/models.md` on {date} with transformers {transformers}, torch {torch}, float32 on
the CPU: a tiny random model of every architecture that transformers generates with, in every mode that stock itself can do,
compared with stock: tokens equal, scores within 2e-4. `tests/support/expected_paths.json` holds the paths: the suite checks a sample of
them, the script all of them.

| | |
|---|---|
| families that run | {families} |
| all layers read from their pages, or their states from slots | {paged} |
| attention layers read from their pages, beside stock's recurrent layers | {beside} |
| some layer read through a dense copy of its pages | {dense} |
| on stock's cache, with one warning | {stock} |
| cannot run here, stock's own errors below | {unrun} |
| answers that are the same | {same:,} |
| answers that differ, or that only the paged call fails to give | {bad} |
| answers that stock itself cannot give | {cannot} |
| families whose steps are captured | {captured} |

**path**: the number of layers of each kind (full attention, a window, cross attention, a recurrent state) and how they are read.
"in slots": recurrent states lie in slots of the pool. "and more": the layer keeps something beside keys and values, which stays in
stock's tensors. **modes**: the number of modes equal to stock's, and those that are not. **apart**: the largest difference of a score.
**captured**: whether decoding steps are replayed, tested with a stand-in for CUDA graphs, or why not.
"""


def _totals(rows: list[Row]) -> dict[str, int]:
    groups = Counter(group(row) for row in rows)
    marks = Counter(mark for row in rows for mark in row["marks"].values())
    return {
        "families": len(rows) - groups["not run"],
        "paged": groups["paged"],
        "beside": groups["paged beside stock's state"],
        "dense": groups["dense"],
        "stock": groups["stock"],
        "unrun": groups["not run"],
        "same": marks["="] + marks["~"],
        "bad": marks["X"] + marks["E"],
        "cannot": marks["-"],
        "captured": sum(row["captured"] == "yes" for row in rows),
    }


# ---- some rows of a page made anew

COUNTS = {
    "all layers read from their pages, or their states from slots": lambda path, _, __: (
        _group_of(path) == "paged"
    ),
    "attention layers read from their pages, beside stock's recurrent layers": lambda path, _, __: (
        _group_of(path) == "paged beside stock's state"
    ),
    "some layer read through a dense copy of its pages": lambda path, _, __: _group_of(path) == "dense",
    "on stock's cache, with one warning": lambda path, _, __: not path,
    "answers that are the same": lambda _, modes, __: int(
        modes.removeprefix("with pictures, ").split(";")[0]
    ),
    "answers that stock itself cannot give": lambda _, modes, __: _names_in(modes, "stock cannot:"),
    "answers that differ, or that only the paged call fails to give": lambda _, modes, __: (
        _names_in(modes, "**differs**:") + _names_in(modes, "**fails**:")
    ),
    "families whose steps are captured": lambda _, __, captured: captured == "yes",
}
"""Lines of the page's head, and the part of a row's path, modes and captures in each."""


def _names_in(modes: str, text: str) -> int:
    """How many modes are named behind a text."""
    found = re.search(re.escape(text) + "([^;]*)", modes)
    return 0 if found is None else len(found[1].split(","))


def _parts(line: str) -> tuple[str, str, str]:
    """The path, modes and captures of a row of the page; no path on stock's cache."""
    *_, path, modes, _, captured = (cell.strip() for cell in line.strip("| ").split(" | "))
    return "" if path.startswith("stock: ") else path, modes, captured


def renewed(text: str, run: Row, media: bool = False) -> str:
    """The page with a run's rows in the place of those of their families, and counts in its head that follow.
    media: rows of the section about pictures, videos and recordings.
    """
    lines = text.splitlines()
    for row in run["rows"]:
        if group(row) == "not run":
            continue
        title = MEDIA_TITLE if media else f"## {TITLES[row['kind']]}"
        begin = f"| {row['family']} | {row['kind'] if media else ''}"
        places = range(lines.index(title), len(lines))
        place = next((i for i in places if lines[i].startswith(begin)), None)
        if place is None:
            raise ValueError(f"{begin!r} is no row below {title!r}; make the page anew")
        old, cells = lines[place], _cells(row)
        if media:
            shown = old.split(" | ")[1]
            cells = cells.replace(f"| {row['family']} |", f"| {row['family']} | {shown} |", 1)
        lines[place] = cells
        if not media:
            lines = [_recounted(line, _parts(old), _parts(cells)) for line in lines]
    names = ", ".join(sorted({row["family"] for row in run["rows"]}))
    title = lines.index(MEDIA_TITLE if media else "# Models")
    begin = next(i for i in range(title, len(lines)) if lines[i].startswith("| "))
    made = f"Made anew on {run['date']} with transformers {run['transformers']}: {names}."
    lines[begin:begin] = [made, ""]
    return "\n".join([*lines, ""])


def _recounted(line: str, old: tuple[str, str, str], new: tuple[str, str, str]) -> str:
    """A line of the head, with a row's new part of its count for the old one."""
    found = re.fullmatch(r"\| (.*) \| ([\d,]+) \|", line)
    count = None if found is None else COUNTS.get(found[1])
    if found is None or count is None:
        return line
    number = int(found[2].replace(",", "")) + int(count(*new)) - int(count(*old))
    return f"| {found[1]} | {number:,} |"


def _table(kind: str, rows: list[Row]) -> str:
    mine = sorted(
        (row for row in rows if row["kind"] == kind and group(row) != "not run"),
        key=lambda row: row["family"],
    )
    lines = [
        f"## {TITLES[kind]}",
        "",
        "| family | path | modes | apart | captured |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_cells(row) for row in mine), ""])


def _cells(row: Row) -> str:
    dense = f" ({row['dense']})" if "dense" in row["path"] and row["dense"] else ""
    path = row["path"] + dense or f"stock: {row['why']}"
    captured = row["captured"].replace("NotCapturable: ", "") or "-"
    cells = (row["family"], path, _modes(row), f"{row['apart']:.0e}", captured)
    return "| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", "/") for cell in cells) + " |"


def _modes(row: Row) -> str:
    """Which modes are the same: all, or all but those that are named."""
    marks = row["marks"]
    same = [name for name, mark in marks.items() if mark in "=~"]
    others = [
        f"{text} {', '.join(names)}"
        for mark, text in (
            ("-", "stock cannot:"),
            ("?", "stock disagrees with itself:"),
            ("t", "parts at a tie:"),
            ("X", "**differs**:"),
            ("E", "**fails**:"),
        )
        if (names := [name for name, found in marks.items() if found == mark])
    ]
    if "~" in marks.values():
        others.append(f"in float64: {', '.join(name for name, found in marks.items() if found == '~')}")
    pictures = "with pictures, " if "text" in marks and row["kind"] == "image" else ""
    return "; ".join([f"{pictures}{len(same)}", *others])


def media(run: Row, other: Row | None) -> str:
    """The section that scripts/sweep_media.py makes; `other` is the run on another transformers."""
    totals, ran = _totals(run["rows"]), [row for row in run["rows"] if group(row) != "not run"]
    lines = [
        MEDIA.format(**run, **totals, classes=len({row["family"] for row in ran})),
        "",
        "| class | shown | path | modes | apart | captured |",
    ]
    lines += ["|---" * 6 + "|"]
    for row in sorted(ran, key=lambda row: (row["family"], row["kind"])):
        family, rest = _cells(row).removeprefix("| ").split(" | ", 1)
        single = "" if any(mode.startswith("two") for mode in row["marks"]) else ", one a prompt"
        lines.append(f"| {family} | {row['kind']}{single} | {rest}")
    lines += ["", "Not compared, with stock's own error or the reason:", "", *_reasons(run["rows"])]
    if other is not None:
        lines += ["", _media_compared(run, other)]
    return "\n".join([*lines, ""])


def _media_compared(run: Row, other: Row) -> str:
    totals, twins = _totals(other["rows"]), {(row["kind"], row["family"]): row for row in run["rows"]}
    told = []
    for row in other["rows"]:
        twin = twins.get((row["kind"], row["family"]))
        if twin is not None and (differing := _otherwise(twin, row)):
            told.append(f"- {row['family']} ({row['kind']}): {'; '.join(differing)}")
    head = f"On transformers {other['transformers']}, {other['date']}: {totals['same']:,} answers are the same, {totals['bad']} differ, stock"
    return "\n".join(
        [head, f"itself cannot give {totals['cannot']}. What is otherwise there than above:", "", *told]
    )


def with_media(text: str, section: str) -> str:
    """The page `text` with this section in the place of its old one, or before the list of what cannot
    run.
    """
    begin, end = text.find(MEDIA_TITLE), text.find("## What cannot run here")
    return text[: end if begin < 0 else begin] + section + "\n" + text[end:]


def media_of(text: str) -> str:
    """The section as it stands in a page, for a page that is made anew; nothing if it has none."""
    begin, end = text.find(MEDIA_TITLE), text.find("## What cannot run here")
    return "" if begin < 0 else text[begin:end].rstrip("\n") + "\n"


def _reasons(rows: list[Row]) -> list[str]:
    """What did not run, and why."""
    lines = []
    for row in sorted(
        (row for row in rows if group(row) == "not run"), key=lambda row: (row["kind"], row["family"])
    ):
        error = row.get("unbuilt") or next((note.split(": ", 1)[1] for note in row["notes"]), "")
        lines.append(f"- {row['family']} ({row['kind']}): {' '.join(error.split())[:160]}")
    return lines


def _not_run(rows: list[Row]) -> str:
    lines = [
        "## What cannot run here",
        "",
        "Stock's own error, from a shrunken config or in its own generate().",
        "",
    ]
    return "\n".join([*lines, *_reasons(rows), ""])


def _on_device(run: Row) -> str:
    """The families that were compared on a device, in float32 and bfloat16."""
    rows, calls = run["rows"], list(dict.fromkeys(call for row in run["rows"] for call in row["marks"]))
    lines = [
        "## On a GPU",
        "",
        f"`python scripts/sweep_device.py`, {run['date']}, {run.get('hardware', 'a CPU')}, torch "
        f"{run['torch']}, transformers {run['transformers']}, steps captured. Marks for {', '.join(calls)}:",
        "= the same tokens, ~ tokens that part where the top two tokens are closer than rounding error, "
        "X different, . not compared",
        "(beams over experts that rounding exchanges). apart: the largest difference of two logits, relative "
        "to the largest logit.",
        "",
        "| family | path | "
        + " | ".join(f"{dtype} | apart" for dtype in dict.fromkeys(row["dtype"] for row in rows))
        + " | replayed |",
        "|---" * (3 + 2 * len({row["dtype"] for row in rows})) + "|",
    ]
    for family in dict.fromkeys((row["kind"], row["family"]) for row in rows):
        mine = [row for row in rows if (row["kind"], row["family"]) == family]
        cells = [
            f"{' '.join(row['marks'].get(call, '-') for call in calls)} | {row.get('apart', 0.0):.0e}"
            for row in mine
        ]
        captured = mine[0].get("captured", "-").replace("NotCapturable: ", "")
        lines.append("| " + " | ".join([family[1], mine[0].get("path") or "stock", *cells, captured]) + " |")
    return "\n".join([*lines, ""])


def _compared(run: Row, other: Row) -> str:
    """What another release does otherwise."""
    totals = _totals(other["rows"])
    new = {(row["kind"], row["family"]): row for row in run["rows"]}
    lines = [
        f"## On transformers {other['transformers']}",
        "",
        f"The same sweep, {other['date']}: {totals['families']} families run: {totals['paged']} paged, "
        f"{totals['beside']} beside stock's",
        f"recurrent layers, {totals['dense']} through dense copies, {totals['stock']} by stock; "
        f"{totals['same']:,} answers are the same, {totals['bad']} differ, stock itself cannot",
        f"give {totals['cannot']}; {totals['captured']} families' steps are captured. What is otherwise "
        "there than above:",
        "",
    ]
    for row in other["rows"]:
        twin = new.get((row["kind"], row["family"]))
        told = [] if twin is None else _otherwise(twin, row)
        if told:
            lines.append(f"- {row['family']} ({row['kind']}): {'; '.join(told)}")
    missing = sorted({row["family"] for row in run["rows"]} - {row["family"] for row in other["rows"]})
    more = sorted({row["family"] for row in other["rows"]} - {row["family"] for row in run["rows"]})
    lines += [f"- not there yet: {', '.join(missing)}"] if missing else []
    lines += [f"- only there: {', '.join(more)}"] if more else []
    return "\n".join([*lines, ""])


def _otherwise(new: Row, old: Row) -> list[str]:
    """What of a family is not the same in both releases."""
    if "not run" in (group(new), group(old)):
        return [] if group(new) == group(old) else ["cannot run" if group(old) == "not run" else "runs"]
    told = [old["path"] or "stock: " + old["why"]] if new["path"] != old["path"] else []
    told += [_modes(old)] if _modes(new) != _modes(old) else []
    captured = [row["captured"] == "yes" for row in (new, old)]
    return told + (
        [f"captured: {old['captured'].replace('NotCapturable: ', '') or 'no'}"]
        if captured[0] != captured[1]
        else []
    )
