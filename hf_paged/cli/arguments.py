"""Arguments that several commands have: the model, and how tokens are drawn."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..engine import Engine
from ..model.adapters.files import CONFIG
from ..model.loading import LOCAL
from ..serve.link.loading import Source


def source_of(given: argparse.Namespace) -> Source:
    """The model of a command."""
    if given.device and given.device_map:
        raise ValueError("--device and --device-map both place the model; give one of them")
    names = [each.name for each in fields(Source) if hasattr(given, each.name)]
    return Source(**{name: getattr(given, name) for name in names})


def adapter_sources(given: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Where adapters lie, by name: of name=path, or of JSON with both as vLLM takes it. models: the names of
    the model.
    """
    found: dict[str, str] = {}
    for each in given:
        if each.startswith("{"):
            try:
                module = json.loads(each)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--lora-modules {each} is not JSON: {error}; give name=path") from error
            name = str(module.get("name", ""))
            path = str(module.get("path", ""))
        else:
            name, _, path = each.partition("=")
        if not name or not path:
            raise ValueError(f"--lora-modules takes name=path, got {each!r}")
        if path.startswith(LOCAL) and not (Path(path) / CONFIG).is_file():  # else a name on the Hub
            raise ValueError(
                f"--lora-modules {each}: there is no {path}/{CONFIG}; give a folder as peft saves it"
            )
        if name in found or name in models:
            of = "two adapters" if name in found else "the model and of an adapter"
            raise ValueError(f"--lora-modules {each}: {name!r} is the name of {of}; choose another one")
        found[name] = path
    return found


def add_adapters(engine: Engine, modules: Mapping[str, str]) -> None:
    """Give an engine the adapters of a command."""
    for name, path in modules.items():
        try:
            engine.add_adapter(name, path)
        except (ValueError, OSError, TypeError, ImportError) as error:
            raise ValueError(f"--lora-modules {name}={path} cannot be loaded: {error}") from error


def sampling_of(given: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `submit()` by which tokens are drawn, or are the likeliest ones."""
    drawn = {name: getattr(given, name) for name in ("top_p", "top_k", "seed")}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if given.temperature > 0:
        return {"do_sample": True, "temperature": given.temperature, **drawn}
    if drawn:
        flag = "--" + next(iter(drawn)).replace("_", "-")
        raise ValueError(f"{flag} needs sampling; give --temperature above 0, or leave it out")
    return {"do_sample": False}


def require_out(given: argparse.Namespace) -> None:
    """Raise unless a file of answers is new, or is to be continued or replaced."""
    if given.resume and given.overwrite:
        raise ValueError("--resume continues the file and --overwrite replaces it; give one of them")
    if given.out is None and (given.resume or given.overwrite):
        flag = "--resume" if given.resume else "--overwrite"
        raise ValueError(f"{flag} is for a file of answers; give --out FILE")
    if given.out is None or not Path(given.out).is_file():
        return
    if given.file is not None and Path(given.file).exists() and Path(given.file).samefile(given.out):
        raise ValueError(f"{given.out} is the file of prompts; give another path for the answers")
    if given.resume or given.overwrite:
        return
    if Path(given.out).stat().st_size:
        raise ValueError(f"{given.out} exists already; --resume continues it, --overwrite replaces it")


def interrupted(out: str) -> str:
    """The last line of a command whose file can be continued."""
    return f"interrupted; the answers so far are in {out}, and --resume continues from there"
