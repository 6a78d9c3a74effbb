"""The plug is in once, whatever imports, reloads and wrappers of others do around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import assert_same
from fresh_process import FreshProcess
from generate_calls import call
from transformers import DynamicCache, GenerationMixin

import hf_paged

METHODS = ("generate", "_prepare_generation_config", "_prepare_cache_for_generation")

SCRIPT = '''
import importlib, sys, warnings

warnings.simplefilter("error")
import torch
from transformers import GenerationMixin

import hf_paged
from hf_paged import demo
from hf_paged.model.cache_name import CACHE

model, tokenizer = demo.model(), demo.tokenizer()
inputs = tokenizer(["The moon fell", "The owl"], return_tensors="pt", padding=True)
options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
stock = model.generate(**inputs, **options)
METHODS = ("generate", "_prepare_generation_config", "_prepare_cache_for_generation")


def wrappers(name):
    """How many wrappers of this package are around a method."""
    found, method = 0, getattr(GenerationMixin, name)
    while method is not None:
        found += "hf_paged" in method.__code__.co_filename
        method = getattr(method, "__wrapped__", None)
    return found


def ours():
    return [name for name in sys.modules if name.split(".")[0] == "hf_paged"]


def autoreload(name):
    """As IPython's extension does it: in an empty namespace."""
    namespace = vars(sys.modules[name])
    loader = namespace["__loader__"]
    namespace.clear()
    namespace.update(__name__=name, __loader__=loader)
    importlib.reload(sys.modules[name])


def check(what):
    package = importlib.import_module("hf_paged")
    answer = model.generate(**inputs, **options, cache_implementation="paged", return_dict_in_generate=True)
    assert torch.equal(answer.sequences, stock), what
    assert type(answer[CACHE]).__name__ == "PagedCache", what
    cache = package.PagedCache(model)
    kept = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True, **{CACHE: cache})
    assert kept[CACHE] is cache, what
    with package.Engine(model, num_blocks=50) as engine:
        assert engine.generate([[5, 6, 7]], max_new_tokens=3)[0].finish_reason == "length", what
    assert [wrappers(name) for name in METHODS] == [1, 1, 1], what
    assert len(model._forward_pre_hooks) == 1, what
    assert package.installed(), what


check("imported")
importlib.reload(hf_paged)
check("reloaded")
for name in ours():
    importlib.reload(sys.modules[name])
check("all modules reloaded")
autoreload("hf_paged.generate.install")
check("one module reloaded")
for name in ours():
    autoreload(name)
check("all modules reloaded by IPython")
for name in ours():
    del sys.modules[name]
check("imported anew")
sys.modules["hf_paged"].uninstall()
assert [wrappers(name) for name in METHODS] == [0, 0, 0]
print("quiet")
'''


def test_reloads_and_second_imports(fresh_process: FreshProcess) -> None:
    """Each leaves one plug, which works, without a warning; transformers was imported before the last one."""
    ended = fresh_process.run(SCRIPT)
    assert ended.code == 0, ended.stderr
    assert ended.stdout == "quiet\n"
    assert ended.stderr == ""


@pytest.fixture
def foreign() -> Iterator[Callable[..., None]]:
    """Puts another package's wrappers around ours, as functools.wraps makes them; they are gone
    afterwards.
    """
    hf_paged.uninstall()
    stocks = {name: getattr(GenerationMixin, name) for name in METHODS}
    hf_paged.install()

    def wrap(**options: Any) -> None:
        for name in METHODS:
            setattr(GenerationMixin, name, _around(getattr(GenerationMixin, name), **options))

    yield wrap
    hf_paged.uninstall()
    for name, stock in stocks.items():
        setattr(GenerationMixin, name, stock)
    hf_paged.install()


def _around(method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    @functools.wraps(method, **options)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return wrapper


def test_wrappers_of_others_stay(llama: Any, ids: torch.Tensor, foreign: Callable[..., None]) -> None:
    """Uninstalling removes no wrapper of theirs, though functools.wraps copies our attributes to it."""
    foreign()
    wrapped = [getattr(GenerationMixin, name) for name in METHODS]
    assert_same(llama, **call(ids))
    hf_paged.uninstall()
    assert [getattr(GenerationMixin, name) for name in METHODS] == wrapped
    answer = llama.generate(**call(ids), return_dict_in_generate=True)
    assert type(answer.past_key_values) is DynamicCache


def test_installed_again_over_a_wrapper(llama: Any, ids: torch.Tensor, foreign: Callable[..., None]) -> None:
    """Our wrappers below theirs pass through from then on; the new ones on top take the word."""
    foreign(updated=())
    hf_paged.uninstall()
    hf_paged.install()
    assert_same(llama, **call(ids))
    answer = llama.generate(**call(ids), cache_implementation="paged", return_dict_in_generate=True)
    assert isinstance(answer.past_key_values, hf_paged.PagedCache)
