"""Try an installed hf_paged without an extra: tokens of stock, the engine, and the files that it ships.

scripts/wheel runs this in an environment that has the wheel and what it requires, by `python -I`: the clone's own
packages are not found.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import hf_paged

SHIPPED = {
    "hf_paged": ("py.typed", "demo/data/model.safetensors", "serve/map/page/map.html"),
    "hf_paged_cli": ("py.typed",),
    "hf_paged_kernels": ("__init__.py",),
    "hf_paged_native": ("paged.cpp",),
}
"""Files of each package: no import would miss them."""
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=320, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def try_tokens() -> None:
    """Compare a random model's answers on pages, and the engine's, with those of stock."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    ids = torch.randint(3, 320, (2, 20))
    for options in ({}, {"num_beams": 4, "num_return_sequences": 2}):
        given = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, **options}
        stock = model.generate(ids, **given)
        paged = model.generate(ids, cache_implementation="paged", **given)
        assert isinstance(paged.cache, hf_paged.PagedCache)
        assert paged.sequences.tolist() == stock.sequences.tolist()
    alone = model.generate(ids[:1], max_new_tokens=12, do_sample=False)[0, 20:].tolist()
    with hf_paged.Engine(model) as engine:
        handle = engine.submit(ids[0].tolist(), max_new_tokens=12, do_sample=False)
        assert handle.result().sequences[0].token_ids == alone
        engine.check()


def main() -> None:
    """Try everything, and print what was tried."""
    place = Path(hf_paged.__file__).parent
    assert place.is_relative_to(sys.prefix), f"{place} is not installed in {sys.prefix}"
    assert version("hf_paged") == hf_paged.__version__
    for package, names in SHIPPED.items():
        for name in names:
            assert (place.parent / package / name).is_file(), f"the wheel has no {package}/{name}"
    try_tokens()
    print(
        f"hf_paged {hf_paged.__version__}, Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}: the same tokens"
    )


if __name__ == "__main__":
    main()
