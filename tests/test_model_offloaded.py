"""Models whose weights accelerate loads for each forward: served as they are, with prefixes (C24)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from families import BY_NAME, build
from model_checks import is_steady
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import hf_paged
from hf_paged.engine import Engine, Unservable
from hf_paged.model.offloaded import input_device

CPU = torch.device("cpu")
PROMPT = [7, 30, 11, 52, 9, 41, 26, 8, 33, 60, 17, 45, 12]
GREEDY = {"max_new_tokens": 6, "do_sample": False}
PAGED = {"cache_implementation": "paged", "cache_config": {"block_size": 4, "prefix_caching": True}}
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate")


def _mapped(model: Any, folder: Path, place: str) -> Any:
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{i}": "cpu" if i == 0 else place for i in range(len(model.model.layers))}
    return dispatch_model(
        model, places | layers, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


def _loaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder / "model")
    places = {"model.embed_tokens": "disk", "model.layers": "disk"}
    places |= {"model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    return type(model).from_pretrained(folder / "model", device_map=places, offload_folder=str(folder)).eval()


OFFLOADS: dict[str, Callable[[Any, Path], Any]] = {
    "disk": lambda model, folder: disk_offload(model, str(folder), CPU),
    "disk with buffers": lambda model, folder: disk_offload(model, str(folder), CPU, offload_buffers=True),
    "memory": lambda model, folder: cpu_offload(model, CPU),
    "whole layers": lambda model, folder: cpu_offload(
        model, CPU, preload_module_classes=["LlamaDecoderLayer"]
    ),
    "with hook": lambda model, folder: cpu_offload_with_hook(model, CPU)[0],
    "map with disk": lambda model, folder: _mapped(model, folder, "disk"),
    "from_pretrained": _loaded,
}


@pytest.fixture(params=OFFLOADS)
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return OFFLOADS[request.param](build(BY_NAME["llama"]), tmp_path)


def stock(model: Any, prompt: list[int] = PROMPT) -> list[int]:
    found: list[int] = model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :].tolist()
    return found


def paged(model: Any) -> list[int]:
    found: list[int] = model.generate(torch.tensor([PROMPT]), **GREEDY, **PAGED)[0, len(PROMPT) :].tolist()
    return found


def served(engine: Engine) -> list[int]:
    output = engine.generate([PROMPT], **GREEDY)[0]
    assert output.error is None
    engine.check()
    return output.sequences[0].token_ids


def test_served_like_any_other(offloaded: Any, llama: Any) -> None:
    expected = [stock(llama, PROMPT[:count]) for count in (13, 5)]
    assert stock(offloaded) == expected[0]
    assert input_device(offloaded) == CPU
    engine = Engine(offloaded, block_size=4)
    for _ in range(2):
        outputs = engine.generate([PROMPT, PROMPT[:5]], **GREEDY)
        assert [output.sequences[0].token_ids for output in outputs] == expected
        assert [output.sequences[0].finish_reason for output in outputs] == ["length", "length"]
    assert outputs[0].cached_tokens == 12  # the second time
    engine.check()


def test_paged_calls_share_prefixes(offloaded: Any, llama: Any) -> None:
    expected = stock(llama)
    assert [paged(offloaded), paged(offloaded)] == [expected, expected]
    assert hf_paged.stats(offloaded).reused == 12
    assert not hf_paged.stats(offloaded).reasons


def _write_in_memory(model: Any, folder: Path) -> None:
    weights = model.model.layers[0].self_attn.v_proj._hf_hook.weights_map
    with torch.no_grad():
        weights["weight"].mul_(-2)


def _replace_in_memory(model: Any, folder: Path) -> None:
    weights = model.model.layers[0].self_attn.v_proj._hf_hook.weights_map
    weights.dataset["model.layers.0.self_attn.v_proj.weight"] = -2 * weights["weight"]


def _write_file(model: Any, folder: Path) -> None:
    file = folder / "model.layers.0.self_attn.v_proj.weight.dat"
    weights = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)
    file.write_bytes((-2 * weights).numpy().tobytes())


def _write_safetensors(model: Any, folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.v_proj.weight"] *= -2
    save_file(tensors, folder / "new", metadata={"format": "pt"})
    os.replace(folder / "new", file)


CHANGES: list[tuple[str, Callable[[Any, Path], None]]] = [
    ("memory", _write_in_memory),
    ("memory", _replace_in_memory),
    ("disk", _write_file),
    ("from_pretrained", _write_safetensors),
]


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_stored_weights_that_change_are_other_weights(kind: str, change: Any, tmp_path: Path) -> None:
    """C24: what was computed before the change is found by nobody."""
    model = OFFLOADS[kind](build(BY_NAME["llama"]), tmp_path)
    engine = Engine(model, block_size=4)
    before = paged(model), served(engine)
    change(model, tmp_path)
    after = stock(model)
    assert before == (stock(build(BY_NAME["llama"])),) * 2
    assert after != before[0]
    assert (paged(model), served(engine)) == (after, after)


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_a_change_under_running_requests_is_an_error(kind: str, change: Any, tmp_path: Path) -> None:
    model = OFFLOADS[kind](build(BY_NAME["llama"]), tmp_path)
    engine = Engine(model, block_size=4)
    handle = engine.submit(PROMPT, **GREEDY)
    engine.step()
    engine.step()
    change(model, tmp_path)
    with pytest.raises(RuntimeError, match=r"engine\.pause\(\)"):
        engine.step()
    engine.pause()
    engine.resume()
    begun = [token for increment in handle.read() for token in increment.token_ids]
    assert handle.result().sequences[0].token_ids == begun + stock(model, [*PROMPT, *begun])[: 6 - len(begun)]
    engine.check()


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_adapters_on_top(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = OFFLOADS[kind](get_peft_model(build(BY_NAME["llama"]), config).eval(), tmp_path)
    expected = stock(model)
    engine = Engine(model, block_size=4)
    assert (paged(model), paged(model), served(engine), served(engine)) == (expected,) * 4
    base = stock(build(BY_NAME["llama"]))
    assert base != expected
    with model.disable_adapter():
        assert (served(engine), paged(model)) == (base, base)
    assert served(engine) == expected


def test_steps_that_load_weights_are_not_captured(offloaded: Any, request: pytest.FixtureRequest) -> None:
    """A replay would read the memory that a loaded weight had once."""
    loads = "with hook" not in request.node.name
    assert is_steady(offloaded) != loads


def test_weights_that_nothing_loads_are_refused_by_name(llama: Any) -> None:
    llama.model.norm.to("meta")
    with pytest.raises(
        Unservable, match=r'1 parameters of .* are on "meta".*model\.norm\.weight.*accelerate'
    ):
        Engine(llama)
