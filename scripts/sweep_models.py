"""Compare stock generate() with the paged cache on a tiny random model of every architecture that
transformers generates with.

    python scripts/sweep_models.py [--only llama t5 ...] [--kinds causal seq2seq image audio] [--modes greedy
        beams ...] [--fused] [--jobs 2] [--seconds 120] [--save FILE.json] [--expect] [--write docs/models.md [--also
        OTHER.json] [--device DEVICE.json]]
    python scripts/sweep_models.py --load FILE.json --write docs/models.md --also OTHER.json    # the page
    once more, from saved rows
    python scripts/sweep_models.py --only llama ... --into docs/models.md    # the rows of these families
    python scripts/sweep_models.py --fused    # steps of all modes are captured, their small operations fused

Every family runs in a process of its own: one that crashes or hangs is one bad row. Exit code 1 if an answer
differs, if only the paged call fails, or if a family has lost the path that tests/support/expected_paths.json
says it had (`--expect` writes that file).
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models_page
import torch
import transformers as tf
from compare import assert_clean, assert_equal
from expected import EXPECTED_FILE, expected_paths, path_of
from fused_models import Kernels, captured_steps
from pictures import pad_left, with_pictures, with_recordings
from tiny import build, mappings, prompts

import hf_paged
from hf_paged.generate.cache import PagedCache
from hf_paged.generate.call import Call
from hf_paged.model.capture import replay as captures
from hf_paged.model.lazy import LazyPages
from hf_paged.model.switch import uses_registry
from hf_paged.model.traced import UNDERSTOOD

TITLES = {
    "causal": "Decoders",
    "seq2seq": "Encoder-decoders",
    "image": "Vision-language models",
    "audio": "Audio models",
}
"""Sections of the pages by family."""
NEW = 12
ALIKE = 2e-4
"""How far scores may lie apart."""
Row = dict[str, Any]
FUSING: Kernels | None = None
"""The kernels of small operations of captured steps, with --fused."""


# ---- modes


def modes(kind: str, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way of calling generate() that a family goes through, over text, and over pictures or recordings
    where one is known.
    """
    given = dict(prompts("seq2seq" if model.config.is_encoder_decoder else "causal"))
    media = {"image": with_pictures, "audio": with_recordings}.get(kind, lambda model: None)(model)
    if media is not None:
        if "input_ids" in media:
            yield "text", given["whole"]
        given = {"whole": media, "padded": pad_left(media)} if "input_ids" in media else {"whole": media}
    whole = given["whole"]
    yield "greedy", whole
    if "padded" in given:
        yield "padded", given["padded"]
        yield "padded beams", {**given["padded"], "num_beams": 2}
    yield "beams", {**whole, "num_beams": 3, "num_return_sequences": 2}
    yield "sample", {**whole, "do_sample": True, "num_return_sequences": 2}
    if media is None and not model.config.is_encoder_decoder:
        repeating = whole["input_ids"][:1, :4].repeat(1, 4)
        yield (
            "lookup",
            {
                "input_ids": repeating,
                "attention_mask": torch.ones_like(repeating),
                "prompt_lookup_num_tokens": 3,
            },
        )
        yield "chunks", {**whole, "prefill_chunk_size": 4}
    yield "details", {**whole, "output_logits": True, "output_hidden_states": True}
    yield "captured", whole


def run_mode(name: str, model: Any, arguments: dict[str, Any]) -> tuple[str, str, float, Any]:
    """The mark of one mode, what is wrong, how far scores lie apart, and the paged answer."""
    arguments = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        **arguments,
    }
    try:
        stock = _generate(model, arguments)
    except Exception as error:
        return "-", f"{type(error).__name__}: {error}", 0.0, None
    try:
        paged = (
            _captured(model, arguments)
            if name == "captured" or FUSING is not None
            else _generate(model, arguments, **models_page.PAGED)
        )
    except Exception:
        return "E", traceback.format_exc(), 0.0, None
    difference = _difference(stock, paged)
    if not difference:
        return "=", "", _apart(stock, paged), paged
    if _difference(stock, _generate(model, arguments)) or _changed_by_stock(stock, paged, model, arguments):
        return "?", "stock disagrees with itself", 0.0, paged
    double = FUSING is None and _same_in_double(model, arguments)  # of which kernels have no chains
    mark = "~" if double else "t" if _part_at_ties(stock, paged, arguments) else "X"
    return mark, difference, _apart(stock, paged), paged


def _generate(model: Any, arguments: dict[str, Any], **word: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**arguments, **word)


def _captured(model: Any, arguments: dict[str, Any]) -> Any:
    """The paged answer with decoding steps captured, a tape standing in for CUDA graphs."""
    with captured_steps(FUSING):
        return _generate(model, arguments, **models_page.PAGED)


def _difference(stock: Any, paged: Any) -> str:
    try:
        assert_equal(_without_cache(stock), _without_cache(paged))
    except AssertionError as error:
        return str(error).strip().replace("\n", " ")[:300]
    return ""


def _changed_by_stock(stock: Any, paged: Any, model: Any, arguments: dict[str, Any]) -> bool:
    """Whether stock's drafts or chunks change what it says, and the paged answer is the one without them: the
    scans of Jamba and Zamba forget what was before a chunk.
    """
    own = ("prompt_lookup_num_tokens", "prefill_chunk_size")
    plain = {name: value for name, value in arguments.items() if name not in own}
    if len(plain) == len(arguments):
        return False
    expected = _generate(model, plain)
    same = torch.equal(expected.sequences, paged.sequences)
    return not _difference(expected, paged) or (same and not torch.equal(expected.sequences, stock.sequences))


def _without_cache(answer: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in answer.items()
        if name not in ("cache", "past_key_values", "cache_params", "state")
    }


def _apart(stock: Any, paged: Any) -> float:
    """The largest difference of a score that both have."""
    pairs = zip(stock.get("scores") or (), paged.get("scores") or (), strict=False)
    apart = [
        (one - other)[one.isfinite() & other.isfinite()].abs()
        for one, other in pairs
        if one.shape == other.shape
    ]
    return max((float(numbers.max()) for numbers in apart if numbers.numel()), default=0.0)


def _part_at_ties(stock: Any, paged: Any, arguments: dict[str, Any]) -> bool:
    """Whether greedy rows part only where stock's scores of both tokens are the same up to rounding, and
    agree before.
    """
    if (
        arguments["do_sample"]
        or arguments.get("num_beams", 1) > 1
        or stock.sequences.shape != paged.sequences.shape
    ):
        return False
    first = stock.sequences.shape[1] - len(stock.scores)
    for row in (stock.sequences != paged.sequences).any(1).nonzero().flatten().tolist():
        step = int((stock.sequences[row] != paged.sequences[row]).nonzero()[0]) - first
        one, other = (answer.sequences[row, first + step] for answer in (stock, paged))
        before = [
            (mine[row] - theirs[row]).nan_to_num().abs().max()
            for mine, theirs in zip(stock.scores, paged.scores, strict=True)
        ][: step + 1]
        if max(before) > ALIKE or abs(stock.scores[step][row, one] - stock.scores[step][row, other]) > ALIKE:
            return False
    return True


def _same_in_double(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a difference goes away where rounding cannot make one: in a copy of the model, as the answers
    that differ hold pages of the model's own numbers.
    """
    given = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    try:
        double = copy.deepcopy(model).double()
        return not _difference(_generate(double, given), _generate(double, given, **models_page.PAGED))
    except Exception:
        return False


# ---- a family


def empty_row(kind: str, family: str) -> Row:
    """A family of which nothing is known yet."""
    return {
        "kind": kind,
        "family": family,
        "marks": {},
        "apart": 0.0,
        "path": "",
        "why": "",
        "captured": "",
        "dense": "",
        "notes": [],
    }


def run_family(kind: str, config_class: Any, wanted: list[str]) -> Row:
    """All modes of one family: marks, path, capture, and what else went wrong."""
    row = empty_row(kind, config_class.model_type)
    try:
        model = build(kind, config_class)
        if not model.can_generate():
            return {**row, "unbuilt": "it does not generate"}
    except Exception as error:
        return {**row, "unbuilt": f"{type(error).__name__}: {error}"}
    setting = model.config._attn_implementation
    for name, arguments in modes(kind, model):
        if wanted and name not in wanted:
            continue
        note_mode(row, name, model, arguments)
        note_clean(row, name, model, setting)
    row["fused"] = 0 if FUSING is None else FUSING.calls.total()
    return row


def note_clean(row: Row, name: str, model: Any, setting: str) -> None:
    """Note what a mode has left behind."""
    gc.collect()
    try:
        assert_clean(model, setting)
    except AssertionError as error:
        row["notes"].append(f"{name} !: not clean: {error or traceback.format_exc()}")


def note_mode(row: Row, name: str, model: Any, arguments: dict[str, Any]) -> None:
    with (
        warnings.catch_warnings(record=True) as caught,
        caches_used() as used,
        copies_noted(row if name == "greedy" else {"dense": "-"}),
    ):
        warnings.simplefilter("always")
        mark, text, apart, answer = run_mode(name, model, arguments)
    parts = used[:2] if model.config.is_encoder_decoder else used[:1]
    row["marks"][name] = mark
    row["apart"] = max(row["apart"], apart)
    if text:
        row["notes"].append(f"{name} {mark}: {text}")
    if answer is None:
        return
    told = [str(entry.message) for entry in caught if issubclass(entry.category, hf_paged.FallbackWarning)]
    if parts and (not row["path"] or name == "greedy"):  # text alone passes by layers that attend to pictures
        row["path"] = path_of(parts)
    row["why"] = row["why"] or (told[0].split("'paged': ")[-1].split("; transformers")[0] if told else "")
    if len(told) > 1:
        row["notes"].append(f"{name} !: {len(told)} warnings for one call")
    if not parts and not told:
        row["notes"].append(f"{name} !: neither paged nor warned")
    if name == "captured" and parts:
        row["captured"] = _how_captured(model, parts)


@contextmanager
def caches_used() -> Iterator[list[PagedCache]]:
    """The paged caches of the calls in between, also of those that hand out none."""
    used: list[PagedCache] = []
    plug = Call.plug

    def watched(call: Call, model: Any, caches: list[PagedCache], made: bool) -> None:
        used.extend(caches)
        plug(call, model, caches, made)

    Call.plug = watched  # type: ignore[method-assign]
    try:
        yield used
    finally:
        Call.plug = plug  # type: ignore[method-assign]


@contextmanager
def copies_noted(row: Row) -> Iterator[None]:
    """Note who wants keys and values as dense tensors, where a layer ends up with a dense path."""
    make = LazyPages._make

    def watched(pages: LazyPages) -> torch.Tensor:
        if pages.step_tokens is not None and not row["dense"]:
            row["dense"] = _asker()
        return make(pages)

    LazyPages._make = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        LazyPages._make = make  # type: ignore[method-assign]


def _asker() -> str:
    """The innermost module of a model's own file that wants a dense copy, and why it does."""
    frame: Any = sys._getframe()
    asked = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "hf_paged.model.attention" and frame.f_code.co_name == "paged_attention":
            given = frame.f_locals["kwargs"].items()
            wanted = sorted(
                key
                for key, value in given
                if value is not None and value is not False and key not in UNDERSTOOD
            )
            asked = f"asks for attention with {', '.join(wanted)}" if wanted else ""
        if name.startswith("transformers.models.") and frame.f_code.co_name != "expand_kv":
            owner = type(frame.f_locals["self"]) if "self" in frame.f_locals else None
            return f"{owner.__name__ if owner else frame.f_code.co_name} {asked or _why_itself(owner)}"
        frame = frame.f_back
    return ""


def _why_itself(owner: Any) -> str:
    source = inspect.getsource(owner) if owner else ""
    if "ALL_ATTENTION_FUNCTIONS" not in source:
        return "has an attention of its own"
    return (
        "computes with keys or values before it asks for attention"
        if uses_registry(owner)
        else "looks at the name of its attention"
    )


def _how_captured(model: Any, parts: list[Any]) -> str:
    """Whether steps were replayed, or why not."""
    known = captures.captures_of(model).pool
    if known.counts["replayed"]:
        return "yes"
    if not all(part.complete for part in parts):
        return "no: a layer keeps its state in tensors of its own"
    return "no: " + next(iter(known.reasons.values()), "its steps are not alike")


def in_child(kind: str, config_class: Any, options: argparse.Namespace) -> tuple[int, int]:
    """Run a family in a fork: a crash, a hang or a leak is its own. The answers are the child and where it
    writes its row.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    signal.alarm(options.seconds)
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        with os.fdopen(writing, "w") as pipe:
            json.dump(run_family(kind, config_class, options.modes), pipe)
    finally:
        os._exit(0)


def finish(child: int, reading: int, kind: str, family: str, seconds: int) -> Row:
    """Wait for a child's row."""
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    died = (
        f"took more than {seconds} s" if status & 127 == signal.SIGALRM else f"died of signal {status & 127}"
    )
    return {**empty_row(kind, family), "unbuilt": died}


def sweep(options: argparse.Namespace) -> list[Row]:
    """The rows of all families, printed as they come, `options.jobs` at a time."""
    todo = [
        (kind, config_class)
        for kind, mapping in mappings().items()
        for config_class in dict.fromkeys(mapping)
        if kind in options.kinds and (not options.only or config_class.model_type in options.only)
    ]
    rows: list[Row] = []
    running: list[tuple[int, int, str, str]] = []
    while todo or running:
        while todo and len(running) < options.jobs:
            kind, config_class = todo.pop(0)
            running.append((*in_child(kind, config_class, options), kind, config_class.model_type))
        child, reading, kind, family = running.pop(0)
        rows.append(finish(child, reading, kind, family, options.seconds))
        print(models_page.line(rows[-1], details=options.details), flush=True)
    return rows


def parser_by_family(about: str | None) -> argparse.ArgumentParser:
    """The arguments of other scripts that run families by in_child(). about: what --help says of the script."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of them by default")
    parser.add_argument("--kinds", nargs="+", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--seconds", type=int, default=120, help="limit for one family")
    parser.set_defaults(modes=[])
    return parser


def main() -> int:
    """Go through the families, print a line for each, and add them up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="model types; all of them by default")
    parser.add_argument("--kinds", nargs="*", default=list(mappings()), choices=list(mappings()))
    parser.add_argument("--modes", nargs="*", default=[], help="names of modes; all of them by default")
    parser.add_argument("--fused", action="store_true", help="capture steps of all modes, with fused kernels")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--seconds", type=int, default=240, help="limit for one family")
    parser.add_argument("--details", action="store_true", help="print tracebacks and what stock cannot do")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    parser.add_argument(
        "--also", type=Path, help="rows that were saved under another transformers, for a section of the page"
    )
    parser.add_argument(
        "--device", type=Path, help="rows that scripts/sweep_device.py saved, for a section of the page"
    )
    parser.add_argument("--load", type=Path, help="take rows that were saved instead of new ones")
    parser.add_argument("--write", type=Path, help="write the page")
    parser.add_argument("--into", type=Path, help="put these rows into the page, in the place of older ones")
    parser.add_argument("--expect", action="store_true", help="make these paths the expected ones")
    options = parser.parse_args()
    if options.fused and (options.write or options.into or options.expect):
        parser.error("--fused is a check of its own; --write, --into and --expect take rows without it")
    global FUSING
    FUSING = Kernels() if options.fused else None
    tf.logging.set_verbosity_error()
    begun = time.monotonic()
    if options.load:
        run = json.loads(options.load.read_text())
    else:
        run = {
            "transformers": tf.__version__,
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "rows": sweep(options),
        }
    if options.save:
        options.save.write_text(json.dumps(run, indent=1))
    if options.write:
        also, device = (
            json.loads(path.read_text()) if path else None for path in (options.also, options.device)
        )
        kept = models_page.media_of(options.write.read_text()) if options.write.exists() else ""
        page = models_page.page(run, also, device)
        options.write.write_text(models_page.with_media(page, kept) if kept else page)
    if options.into:
        options.into.write_text(models_page.renewed(options.into.read_text(), run))
    if options.expect:
        others = expected_paths() if options.only else {}
        EXPECTED_FILE.write_text(models_page.expected(run["rows"], others))
    print(f"\n{time.monotonic() - begun:.0f} s, transformers {run['transformers']}")
    return models_page.summary(run["rows"])


if __name__ == "__main__":
    sys.exit(main())
