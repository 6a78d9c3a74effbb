"""Models by name: nothing that a checkpoint brings is run, unless the operator says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BY_NAME, build

from hf_paged import demo
from hf_paged.serve.link.loading import Source
from hf_paged_cli.main import main


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    """A file that a checkpoint's code makes."""
    return tmp_path / "touched"


@pytest.fixture
def own_code(tmp_path: Path, touched: Path) -> Path:
    """A checkpoint with a config, a model and a tokenizer of its own code."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "code.py").write_text(
        f"from pathlib import Path\nPath({str(touched)!r}).touch()\n"
        "from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
        "class OwnModel(PreTrainedModel):\n    config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    own = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "own", "architectures": ["OwnModel"], "auto_map": own})
    )
    tokenizer = {"auto_map": {"AutoTokenizer": ["code.OwnTokenizer", "code.OwnTokenizer"]}}
    demo.tokenizer().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("way", ["load", "outline", "load_tokenizer", "load_processor"])
def test_code_of_a_checkpoint_is_not_run(own_code: Path, touched: Path, way: str) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        getattr(Source(str(own_code)), way)()
    assert not touched.exists()


def test_code_of_a_checkpoint_is_run_on_demand(
    own_code: Path, touched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert Source(str(own_code), trust_remote_code=True).checkpoint.config.model_type == "own"
    assert touched.exists()


def test_the_command_says_which_flag_would_run_it(
    own_code: Path, touched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(own_code)]) == 1
    assert "trust_remote_code" in capsys.readouterr().err
    assert not touched.exists()


def test_a_pickled_checkpoint_runs_no_code(tmp_path: Path, touched: Path) -> None:
    """transformers reads tensors alone out of pytorch_model.bin."""
    folder = tmp_path / "pickled"
    model = build(BY_NAME["llama"])
    model.config.save_pretrained(folder)
    torch.save({**model.state_dict(), "more": Touch(touched)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match="Weights only load failed"):
        Source(str(folder)).load()
    assert not touched.exists()
