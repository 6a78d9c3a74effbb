"""Every test leaves every pool whole: the books add up afterwards (contract C7)."""

from __future__ import annotations

import gc
import hashlib
import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import BY_NAME, VOCABULARY, build
from fresh_process import FreshProcess
from hypothesis import HealthCheck, settings
from releases import skipping_refused

import hf_paged
from hf_paged.engine import Engine
from hf_paged.kv import store
from hf_paged.model.registry import memories
from hf_paged.model.thread_state import mode_depths
from hf_paged_native import building

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # an example takes as long as the machine takes


def pytest_configure(config: pytest.Config) -> None:
    """Tests name a cache as all releases do; transformers 5.24 has another name, and takes this one."""
    config.addinivalue_line("filterwarnings", "ignore:`past_key_values` is deprecated:FutureWarning")
    gc.disable()  # while tests are collected: what is imported then stays


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """A model that this release cannot have on pages, and that is refused by name, needs no fixture."""
    with skipping_refused():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Nor is there a test of it."""
    with skipping_refused():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cases of ranks share one long start of processes, which comes first: the other worker takes tests from this
    one's end meanwhile.
    """
    items.sort(key=lambda item: item.path.name != "test_engine_parallel.py")


def pytest_collection_finish() -> None:
    """Imported modules and tests stay: a full collection that looked at them took a seventh of the suite's time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _earlier_modules_stay() -> None:
    """A full collection looks at nothing that earlier modules of tests have left: imports, compiled code, kept models."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _whole_pools() -> Iterator[None]:
    yield
    for memory in memories():
        memory.check()
    assert hf_paged.installed()


@pytest.fixture(autouse=True)
def _gradients_are_computed() -> Iterator[None]:
    """A test that leaves gradients off fails, and not the tests after it."""
    yield
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert enabled
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad
    assert mode_depths() == (0, 0)


@pytest.fixture(autouse=True)
def _nothing_is_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool begins with NaN in every slot that has not been written, as fresh memory may: a read of such a slot
    shows.
    """

    def poisoned(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        data = empty(elements, dtype, device)
        return data.fill_(float("nan")) if dtype.is_floating_point else data

    empty = store.allocate
    monkeypatch.setattr(store, "allocate", poisoned)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _seeds_are_the_cpus() -> None:
    """torch.manual_seed() keeps each seed, and the stack it came by, for devices that are not there."""
    if not torch.cuda.is_available():
        for device in (torch.cuda, torch.mtia, torch.xpu):
            device.manual_seed_all = lambda seed: None


@pytest.fixture(scope="session", autouse=True)
def _interrupts_come() -> None:
    """A shell starts what runs in its background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _nothing_built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The C++ op that somebody built on this machine stays out of tests that do not ask for it."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("extensions"))


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(kept: Path) -> Iterator[None]:
    """A compiler of this machine makes each C++ library once, for all processes and later runs, in whatever folders it
    is built.
    """
    compile_anew = building.run_compiler

    def compile_once(command: list[str]) -> None:
        *words, target = command
        if words[0] not in building.COMPILERS:
            compile_anew(command)
            return
        known = kept / f"library-{_digest(words)}"
        if not known.exists():
            compile_anew(command)
            shutil.copyfile(target, f"{known}-{os.getpid()}")
            os.replace(f"{known}-{os.getpid()}", known)
            return
        shutil.copyfile(known, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "run_compiler", compile_once)
        yield


def _digest(words: list[str]) -> str:
    """Of a compiler's command and of all files that it reads: the compiler, sources and the header."""
    files = [shutil.which(words[0]) or "", *words[1:], str(building.HEADER)]
    found = hashlib.sha256(shlex.join(words).encode())
    for file in filter(os.path.isfile, files):
        found.update(Path(file).read_bytes())
    return found.hexdigest()


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where tests of the C++ ops build them, once for all processes of the suite."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if hasattr(request.config, "workerinput") else own) / "native"


@pytest.fixture(scope="session")
def kept(native_folder: Path, request: pytest.FixtureRequest) -> Path:
    """A folder for what takes long to make and does not change: later runs find it in pytest's cache, if there is one."""
    cache = getattr(request.config, "cache", None)
    return native_folder.parent if cache is None else cache.mkdir("kept")


@pytest.fixture(scope="session")
def fresh_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProcess]:
    process = FreshProcess(tmp_path_factory.mktemp("fresh"))
    yield process
    process.close()


@pytest.fixture
def llama() -> torch.nn.Module:
    """A fresh tiny Llama with grouped-query attention."""
    return build(BY_NAME["llama"])


@pytest.fixture
def model(llama: torch.nn.Module) -> torch.nn.Module:
    """Of the fixture `engine`."""
    return llama


@pytest.fixture
def engine(model: torch.nn.Module) -> Engine:
    """A small engine, which everybody fills."""
    return Engine(model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8)


@pytest.fixture
def ids() -> torch.Tensor:
    """Three prompts of 13 tokens."""
    return torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(3))
