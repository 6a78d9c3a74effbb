"""The flags of `hf-paged serve` as the keys of a configuration file."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Mapping
from typing import Any

from hf_paged_cli.parser import parser

OF_RAY = {
    "port": "set http_options.port of Ray Serve",
    "uds": "Ray Serve listens on a port",
    "root_path": "set route_prefix of the application",
    "ssl_keyfile": "set http_options.ssl_keyfile of Ray Serve",
    "ssl_certfile": "set http_options.ssl_certfile of Ray Serve",
    "ssl_keyfile_password": "set http_options of Ray Serve",
    "ssl_ca_certs": "set http_options of Ray Serve",
    "dev": "weights of replicas change together, by user_config",
    "allow_runtime_lora_updating": "adapters of replicas change together, by user_config",
}
"""Flags that a replica does not take, and what to do instead."""


def namespace(options: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments of `hf-paged serve MODEL ...`, parsed. options: `model`, and flags by their names with -
    or _.

    true sets a flag, false and null leave it out, a list gives it several values.
    """
    given = {name.replace("-", "_"): value for name, value in options.items()}
    model = given.pop("model", None)
    if not isinstance(model, str):
        raise ValueError(f"args.model must be a name on the Hub, a folder or demo, got {model!r}")
    taken = sorted(given.keys() & OF_RAY.keys())
    if taken:
        raise ValueError(f"args.{taken[0]} is not taken by replicas: {OF_RAY[taken[0]]}")
    top, commands = parser()
    arguments = ["serve", model]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        arguments += _arguments(flag, value, _takes_many(commands["serve"], flag))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed, unknown = top.parse_known_args(arguments)
            if unknown:
                commands["serve"].refuse(unknown)
    except SystemExit:
        reason = said.getvalue().partition("\n")[0].removeprefix("hf-paged serve: ")
        raise ValueError(f"args of the application: {reason}; docs/serving.md has all flags") from None
    return parsed


def _arguments(flag: str, value: Any, many: bool) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if not isinstance(value, list | tuple):
        return [f"{flag}={value}"]
    return [flag, *map(str, value)] if many else [f"{flag}={each}" for each in value]


def _takes_many(command: argparse.ArgumentParser, flag: str) -> bool:
    """True if a flag takes several values behind it, rather than being repeated."""
    action = command._option_string_actions.get(flag)
    return action is not None and action.nargs == "+"
