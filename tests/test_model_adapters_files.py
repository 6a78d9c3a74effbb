"""An adapter's folder is read with a deadline, and by bytes: nobody waits for a disk that hangs."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapters import adapted, lora
from families import BY_NAME, build
from safetensors.torch import load_file

from hf_paged import Engine
from hf_paged.model.adapters import files
from hf_paged.model.adapters.files import PICKLED, SAFETENSORS, read_folder, require_folder

LIMIT = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    adapted(lora()).save_pretrained(tmp_path)
    return tmp_path / "one"


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_what_is_read_is_what_peft_reads(folder: Path, pickled: bool) -> None:
    if pickled:
        torch.save(load_file(folder / SAFETENSORS), folder / PICKLED)
        (folder / SAFETENSORS).unlink()
    weights, config = read_folder(str(folder), None)
    expected = peft.load_peft_weights(str(folder), device="cpu")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert config.to_dict() == peft.PeftConfig.from_pretrained(str(folder)).to_dict()


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_runs_no_code(folder: Path, tmp_path: Path) -> None:
    """Of weights that are pickled, tensors alone are read; the file is refused for anything else."""
    touched = tmp_path / "touched"
    torch.save({"weight": torch.ones(2), "more": Touch(touched)}, folder / PICKLED)
    (folder / SAFETENSORS).unlink()
    with Engine(build(BY_NAME["llama"]), num_blocks=32) as engine:
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            engine.add_adapter("poet", folder)
        assert not touched.exists()
        engine.check()
    torch.load(folder / PICKLED, weights_only=False)
    assert touched.exists()


@pytest.mark.parametrize("name", [SAFETENSORS, PICKLED, files.CONFIG])
def test_a_pipe_is_no_file(folder: Path, name: str) -> None:
    """Its open would wait for a writer for ever; safetensors' with the interpreter's lock."""
    (folder / SAFETENSORS).unlink() if name == PICKLED else (folder / name).unlink()
    os.mkfifo(folder / name)
    with Engine(build(BY_NAME["llama"]), num_blocks=32) as engine:
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            engine.add_adapter("poet", folder)
        assert engine.generate([[5, 6, 7]], max_new_tokens=2)
        engine.check()


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / SAFETENSORS).unlink()
    with pytest.raises(FileNotFoundError, match="has neither"):
        read_folder(str(folder), None)
    (folder / files.CONFIG).unlink()
    with pytest.raises(FileNotFoundError, match="not a folder with"):
        require_folder(str(folder))


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A disk that answers as soon as the test lets it."""
    answers = threading.Event()
    asked = threading.Event()

    def slow(path: str, *arguments: Any, **options: Any) -> Any:
        if path.endswith(SAFETENSORS):
            asked.set()
            answers.wait(LIMIT)
        return open(path, *arguments, **options)

    monkeypatch.setattr(files, "open", slow, raising=False)
    yield asked, answers
    answers.set()


def test_a_disk_that_hangs_ends_one_load_alone(
    folder: Path, hung: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "STALLS", 0.3)
    _, answers = hung
    with Engine(build(BY_NAME["llama"]), num_blocks=32) as engine:
        with pytest.raises(TimeoutError, match="returned no data for"):
            engine.add_adapter("poet", folder)
        answers.set()
        engine.add_adapter("poet", folder)
        assert engine.submit([5, 6, 7], adapter="poet", max_new_tokens=2).result().error is None


def test_requests_go_on_while_a_disk_hangs_and_a_close_ends_the_load(folder: Path, hung: Any) -> None:
    asked, _ = hung
    engine = Engine(build(BY_NAME["llama"]), num_blocks=32)
    errors: list[BaseException] = []

    def add() -> None:
        try:
            engine.add_adapter("poet", folder)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    assert asked.wait(LIMIT)
    assert engine.submit([5, 6, 7], max_new_tokens=4).result().error is None
    assert thread.is_alive()
    engine.close()
    thread.join(LIMIT)
    assert "was closed" in str(errors[0])
