"""Models by name: nothing that a checkpoint brings is run, unless the operator says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import BY_NAME, build
from releases import require_own_adapters
from transformers import AutoModelForCausalLM

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
    assert Source(str(own_code), trust_remote_code=True).load_processor()("The fox")["input_ids"]


def test_an_adapters_folder_loads_its_model_too(tmp_path: Path) -> None:
    """The words are the model's, unless the folder has its own."""
    require_own_adapters()
    demo.model().save_pretrained(tmp_path / "base")
    demo.tokenizer().save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft.LoraConfig(target_modules=["q_proj"])
    )
    folder = tmp_path / "adapter"
    adapted.save_pretrained(folder)
    source = Source(str(folder))
    assert type(source.outline()) is type(adapted.get_base_model())
    assert source.load_processor().get_vocab() == demo.tokenizer().get_vocab()
    tokenizer = demo.tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    assert "<more>" in source.load_tokenizer().get_vocab()
    loaded = source.load()
    assert loaded.active_adapters() == ["default"]


def test_an_adapter_without_the_name_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ValueError, match="does not name its model; load the model and add the adapter"):
        Source(str(tmp_path)).load_processor()


def test_a_config_that_names_no_class(tmp_path: Path) -> None:
    """As save_pretrained of a config alone writes it: transformers finds the class by the model's type."""
    demo.tokenizer().save_pretrained(tmp_path)
    build(BY_NAME["llama"]).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("architectures", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = Source(str(tmp_path))
    assert type(source.outline()).__name__ == "LlamaForCausalLM"
    assert source.load_processor().get_vocab() == demo.tokenizer().get_vocab()


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
