"""Models by name: what transformers loads, as the class it was trained with, and the tokenizer with it."""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
)  # fmt: skip
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as progress
from transformers.utils.peft_utils import find_adapter_config_file

logger = logging.getLogger("hf_paged")

DEMO = ("demo", "hf_paged.demo")
"""Names of the model that comes with hf_paged."""
FILES = Path(__file__).resolve().parent.parent / "demo" / "data"
"""The files of that model."""
LOCAL = ("/", "./", "../", "~")
"""How a path begins that is no name on the Hub."""
OF_FILES = (
    "revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder",
    "trust_remote_code",
)  # fmt: skip
"""Keywords of from_pretrained() that say where files come from: config and tokenizer take them, too."""
OF_DIVISION = ("device_map", "tp_plan", "distributed_config")
"""Those that place a model."""


class Checkpoint(NamedTuple):
    """A name on the Hub, a folder, or "demo", and the keywords by which its files are found."""

    name: str
    files: Mapping[str, Any]

    @classmethod
    def of(cls, name: str | os.PathLike[str], keywords: Mapping[str, Any]) -> Checkpoint:
        """Take the keywords about files out of those of from_pretrained(); others are left."""
        require_path(os.fspath(name))
        found = {key: keywords[key] for key in OF_FILES if keywords.get(key) is not None}
        return cls(_located(name), found)

    @property
    def base(self) -> Checkpoint:
        """The checkpoint that an adapter's folder names; any other is its own."""
        if Path(self.name).is_file():  # a config
            return self
        found = find_adapter_config_file(self.name, **_without(self.files, "trust_remote_code"))
        if found is None or (Path(self.name) / "config.json").is_file():
            return self
        name = json.loads(Path(found).read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not name:
            raise ValueError(
                f"the adapter {self.name} does not name its model; load the model and add the adapter"
            )
        return Checkpoint(name, _without(_without(self.files, "revision"), "subfolder"))

    @property
    def is_demo(self) -> bool:
        """True for the model that comes with hf_paged."""
        return self.name == os.fspath(FILES)

    @property
    def config(self) -> Any:
        """The model's config."""
        return AutoConfig.from_pretrained(self.name, **self.files)

    @property
    def model_class(self) -> Any:
        """The class that the checkpoint names, if it generates; else what transformers takes for it."""
        if self.base is not self:
            return AutoModelForCausalLM
        names = getattr(self.config, "architectures", None) or ()
        found = [getattr(transformers, name, None) for name in names]
        own = [kind for kind in found if isinstance(kind, type) and issubclass(kind, GenerationMixin)]
        return own[0] if own else AutoModelForCausalLM

    def load(self, quiet: bool = False, /, **keywords: Any) -> Any:
        """The model, ready to generate. quiet: without a bar, as where nobody looks at one. keywords:
        from_pretrained()'s, beside those about files.
        """
        _require_folder(self.name)
        if self.base.is_demo and keywords.get("dtype") in (None, "auto"):
            keywords["dtype"] = torch.float32  # its weights are kept in half of that
        with _without_bars() if quiet or not is_watched() else nullcontext():
            return self.model_class.from_pretrained(self.name, **self.files, **keywords).eval()

    def load_processor(self, source: str | None = None) -> Any:
        """The processor of a model that takes images, else its tokenizer. source: where it lies, if apart."""
        if not takes_images(self.base.model_class):
            return self.load_tokenizer(source)
        try:
            return AutoProcessor.from_pretrained(_located(source or self.name), **self.files)
        except Exception as error:  # whatever its code raises, texts can be served
            logger.warning(
                "images are not served, the processor of %s cannot be loaded: %s", self.name, error
            )
            return self.load_tokenizer(source)

    def load_tokenizer(self, source: str | None = None) -> Any:
        """The tokenizer: of an adapter the one in its folder, else that of its model."""
        _require_folder(self.name)
        base = self.base
        if source is None and base is not self and not get_tokenizer_config(self.name, **self.files):
            return base.load_tokenizer()
        return AutoTokenizer.from_pretrained(_located(source or self.name), **self.files)

    def outline(self, dtype: torch.dtype | None = None) -> Any:
        """The model without weights: its modules on the meta device. dtype: else the config's."""
        if self.base is not self:
            return self.base.outline(dtype)
        config, kind = self.config, self.model_class
        if dtype is None and self.is_demo:
            dtype = torch.float32
        with torch.device("meta"):
            make = getattr(kind, "_from_config", None) or kind.from_config
            model = make(config, **({} if dtype is None else {"dtype": dtype})).eval()
        with suppress(OSError):  # it has none
            folder = Path(self.name).parent if Path(self.name).is_file() else self.name
            model.generation_config = GenerationConfig.from_pretrained(folder, **self.files)
        return model


def load_with_words(
    name: str | os.PathLike[str], tokenizer: Any, keywords: Mapping[str, Any]
) -> tuple[Any, Any]:
    """A model, and its processor or tokenizer. tokenizer: another one, or the name of one. keywords:
    from_pretrained()'s; where none places the model it is on the first device.
    """
    found = Checkpoint.of(name, keywords)
    if tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = found.load_processor(None if tokenizer is None else os.fspath(tokenizer))
    others = {key: value for key, value in keywords.items() if key not in found.files}
    if not any(key in others for key in OF_DIVISION):
        others["device_map"] = first_device()
    return found.load(**others), tokenizer


def takes_images(kind: Any) -> bool:
    """True if the forward of a model, or of a class of models, takes images. An Auto class has none."""
    forward = getattr(kind, "forward", None)
    return forward is not None and any(
        name.startswith("pixel_values") for name in inspect.signature(forward).parameters
    )


def require_path(name: str) -> None:
    """Raise if a name is a path, of a folder or of a config's file, and nothing is there."""
    if (name.startswith(LOCAL) or name.endswith(".json")) and not Path(name).exists():
        kind = "file" if name.endswith(".json") else "folder"
        raise ValueError(f"there is no {kind} {name}; give that of a model, a name on the Hub, or {DEMO[0]}")


def is_watched() -> bool:
    """True in a terminal and in a notebook; transformers draws its bars into files and pipes as well."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _require_folder(name: str) -> None:
    """Raise for a file, such as a config: its weights and its tokenizer lie beside it."""
    if Path(name).is_file():
        raise ValueError(f"{name} is a file; give its folder, {Path(name).parent}, which has the weights too")


def _located(name: str | os.PathLike[str]) -> str:
    """A name on the Hub or a folder; that of the demo model instead of its name."""
    return os.fspath(FILES if name in DEMO else name)


def first_device() -> str:
    """The first CUDA device, or the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


@contextmanager
def _without_bars() -> Iterator[None]:
    """Have transformers show no bars. Those of downloads are shown where somebody looks at them."""
    shown = progress.is_progress_bar_enabled()
    downloads = not are_progress_bars_disabled()
    with warnings.catch_warnings(action="ignore"):  # an environment variable may decide for the downloads
        progress.disable_progress_bar()
        if downloads and is_watched():
            enable_progress_bars()
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore"):
            if shown:
                progress.enable_progress_bar()
            (enable_progress_bars if downloads else disable_progress_bars)()


def _without(keywords: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if key != name}
