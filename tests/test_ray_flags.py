"""The flags of hf_paged.ray are those of the server."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged.ray.flags import namespace


def test_flags_are_those_of_the_server() -> None:
    found = namespace(
        {
            "model": "demo", "max-num-seqs": 32, "block_size": "8", "served-model-name": ["x", "y"],
            "allowed_origin": ["https://a", "https://b"], "enforce-eager": True, "compile": False, "seed": None,
        }
    )  # fmt: skip
    assert (found.model, found.max_num_seqs, found.block_size) == ("demo", 32, 8)
    assert found.served_model_name == ["x", "y"]
    assert found.allowed_origin == ["https://a", "https://b"]
    assert found.enforce_eager
    assert not found.compile
    assert found.seed is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "args.model must be"),
        ({"model": "demo", "block-sise": 8}, "block-sise.*did you mean --block-size"),
        (
            {"model": "demo", "block-size": "many"},
            "block-size: expected a whole number from 1 on, got 'many'",
        ),
        ({"model": "demo", "port": 1}, "http_options.port"),
        ({"model": "demo", "dev": True}, "user_config"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        namespace(options)
