"""Compare stock generate() with the paged cache on every model class of transformers that takes pictures,
videos or recordings.

    python scripts/sweep_media.py [--only LlavaForConditionalGeneration ...] [--seconds 240] [--jobs 2]
        [--details] [--save FILE.json] [--write docs/models.md [--also OTHER.json]]
    python scripts/sweep_media.py --load FILE.json --write docs/models.md --also OTHER.json    # the section
    once more, from saved rows
    python scripts/sweep_media.py --only LlavaForConditionalGeneration ... --into docs/models.md    # their rows

A tiny random model of every class that generates and whose forward takes such inputs, in the auto mappings or
not. Two prompts, each with one picture (video, recording) of its own and then with two: greedy, padded,
beams, samples, hidden states, captured steps. A way of showing counts only if another picture changes the
logits. The section "Pictures, videos and recordings" of the page is replaced. Exit code 1 if an answer
differs, or if only the paged call fails.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import inspect
import json
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / "support")]
import models_page  # noqa: E402 (it and the next ones need the line above)
import sweep_models  # noqa: E402
from pictures import Inputs, pad_left, with_pictures, with_recordings, with_videos  # noqa: E402
from sweep_models import Row, empty_row  # noqa: E402
from tiny import build_class, mappings  # noqa: E402

from hf_paged.model.cache_name import CACHE  # noqa: E402

TAKEN = {
    "pictures": ("pixel_values", "image_pixel_values", "image_patches", "flattened_patches"),
    "videos": ("pixel_values_videos", "qformer_input_ids"),
    "recordings": ("input_features", "input_values", "audio_input_features"),
}
"""Names in a forward that mean that it takes such inputs."""
SHOW: dict[str, Callable[..., Inputs | None]] = {
    "pictures": with_pictures,
    "videos": with_videos,
    "recordings": with_recordings,
}
UNKNOWN = "no inputs are known that change the logits"


# ---- the classes


@functools.cache
def classes() -> dict[str, tuple[Any, Any, str]]:
    """Every class that generates from such inputs, by name: the class, its config, and its kind in the auto
    mappings or nothing.
    """
    kinds = {
        found.__name__: (found, config, kind)
        for kind, mapping in mappings().items()
        for config in mapping
        for found in (mapping[config] if isinstance(mapping[config], tuple) else (mapping[config],))
    }
    known = {cls.__name__: (cls, cls.config_class, "") for cls in _generating()}
    both = {**known, **kinds}
    return {name: both[name] for name in sorted(both) if _whats(both[name][0])}


def _generating() -> Iterator[Any]:
    """The classes in transformers' model files that can generate."""
    for package in pkgutil.iter_modules(tf.models.__path__):
        for file in pkgutil.iter_modules([str(Path(path) / package.name) for path in tf.models.__path__]):
            if not file.name.startswith("modeling_"):
                continue
            try:
                module = importlib.import_module(f"transformers.models.{package.name}.{file.name}")
            except ImportError:
                continue  # it wants a package that is not installed
            for value in vars(module).values():
                if (
                    inspect.isclass(value)
                    and value.__module__ == module.__name__
                    and issubclass(value, tf.GenerationMixin)
                ):
                    yield value


def _whats(model_class: Any) -> list[str]:
    taken = inspect.signature(model_class.forward).parameters
    return [what for what, names in TAKEN.items() if any(name in taken for name in names)]


# ---- a class


def modes(model: Any, what: str) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Ways of calling generate() on prompts with one of `what` each, then on prompts with two; a reason if
    there is no way of showing it.
    """
    for each in (1, 2):
        if each == 2 and model.config.is_encoder_decoder and model.main_input_name != "input_ids":
            return  # one input a prompt is all that there is
        name = "" if each == 1 else "two: "
        try:
            shown = SHOW[what](model, 2, each)
        except Exception as error:  # stock takes not even what the family's processor makes
            yield name, f"{type(error).__name__}: {error}"
            continue
        if shown is None:
            yield name, UNKNOWN
            continue
        yield f"{name}greedy", shown
        yield f"{name}beams", {**shown, "num_beams": 3, "num_return_sequences": 2}
        yield f"{name}sample", {**shown, "do_sample": True, "num_return_sequences": 2}
        if "input_ids" in shown:
            yield f"{name}padded", pad_left(shown)
            yield f"{name}padded beams", {**pad_left(shown), "num_beams": 2}
        if each == 1:
            yield "details", {**shown, "output_logits": True, "output_hidden_states": True}
            yield "captured", shown


def run_class(kind: str, name: str, wanted: list[str]) -> Row:
    """The rows of one class: one for each kind of input that it takes."""
    gc.freeze()  # what all the imported models consist of is looked through after every mode otherwise
    model_class, config_class, kind = classes()[name]
    whats = _whats(model_class)
    try:
        model = build_class(model_class, config_class, kind)
        if not model.can_generate():
            raise TypeError("it does not generate")
        if _keeps_nothing(model):
            raise TypeError("its own generate() keeps no keys and values")
    except Exception as error:
        return {
            "rows": [
                {**empty_row(what, name), "unbuilt": f"{type(error).__name__}: {error}"} for what in whats
            ]
        }
    return {"rows": [row for what in whats if (row := _row(model, what, name, wanted)) is not None]}


def _keeps_nothing(model: Any) -> bool:
    """Whether neither the model's own generate() nor a model inside it has a cache, as where a classifier
    names every frame.
    """
    inside = any(isinstance(module, tf.GenerationMixin) for module in model.modules() if module is not model)
    cached = CACHE in inspect.signature(model.forward).parameters
    return "generate" in vars(type(model)) and not inside and not cached


def _row(model: Any, what: str, name: str, wanted: list[str]) -> Row | None:
    row, setting = empty_row(what, name), model.config._attn_implementation
    for mode, arguments in modes(model, what):
        if isinstance(arguments, str) and not mode:
            # A query transformer's text is a hint, no proof, that its pictures may be videos.
            return (
                {**row, "unbuilt": arguments}
                if what != "videos" or "pixel_values_videos" in inspect.signature(model.forward).parameters
                else None
            )
        if isinstance(arguments, str):
            row["notes"].append(f"{mode}-: {arguments}")
        elif not wanted or mode in wanted:
            sweep_models.note_mode(row, mode, model, arguments)
            sweep_models.note_clean(row, mode, model, setting)
    return row


def sweep(options: argparse.Namespace) -> list[Row]:
    """The rows of all classes, printed as they come, `options.jobs` at a time."""
    sweep_models.run_family = run_class  # in a fork of its own, as there
    todo = [name for name in classes() if not options.only or name in options.only]
    rows: list[Row] = []
    running: list[tuple[int, int, str]] = []
    while todo or running:
        while todo and len(running) < options.jobs:
            name = todo.pop(0)
            running.append((*sweep_models.in_child("", name, options), name))
        child, reading, name = running.pop(0)
        found = sweep_models.finish(child, reading, "", name, options.seconds)
        for row in found.get("rows") or [found]:
            rows.append(row)
            print(models_page.line(row, details=options.details), flush=True)
    return rows


def main() -> int:
    """Go through the classes, print a line for each, and add them up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of classes; all of them by default")
    parser.add_argument("--modes", nargs="*", default=[], help="names of modes; all of them by default")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time")
    parser.add_argument("--seconds", type=int, default=240, help="limit for one class")
    parser.add_argument("--details", action="store_true", help="print tracebacks and what stock cannot do")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    parser.add_argument(
        "--load", type=Path, help="take saved rows; with --only, all but those of these classes"
    )
    parser.add_argument("--also", type=Path, help="rows that were saved under another transformers")
    parser.add_argument("--write", type=Path, help="replace the section of the page")
    parser.add_argument("--into", type=Path, help="put these rows into the page, in the place of older ones")
    options = parser.parse_args()
    tf.logging.set_verbosity_error()
    begun = time.monotonic()
    run: Row = {
        "transformers": tf.__version__,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }
    if options.load:
        run = json.loads(options.load.read_text())
    if options.only or not options.load:
        kept = [row for row in run["rows"] if row["family"] not in options.only]
        run["rows"] = kept + sweep(options)
    if options.save:
        options.save.write_text(json.dumps(run, indent=1))
    if options.write:
        also = json.loads(options.also.read_text()) if options.also else None
        options.write.write_text(
            models_page.with_media(options.write.read_text(), models_page.media(run, also))
        )
    if options.into:
        options.into.write_text(models_page.renewed(options.into.read_text(), run, media=True))
    bad = [row["family"] for row in run["rows"] if models_page.complaints(row)]
    print(
        f"\n{time.monotonic() - begun:.0f} s, transformers {run['transformers']}, bad rows: "
        f"{', '.join(bad) or 'none'}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
