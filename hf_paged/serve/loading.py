"""Models by name: what transformers loads, as the class it was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationMixin
from transformers.utils.peft_utils import find_adapter_config_file

DEMO = ("demo", "hf_paged.demo")
"""Names of the model that comes with hf_paged."""


@dataclass(frozen=True)
class Source:
    """Where a model and its tokenizer come from.

    dtype: "auto" takes the checkpoint's. device: without it the first CUDA device, or the CPU. device_map:
    instead, as from_pretrained takes it.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False

    @property
    def name(self) -> str:
        """What clients call the model unless the operator chooses another name."""
        return "demo" if self.model in DEMO else self.model

    def load(self) -> Any:
        """The model, ready to generate."""
        if self.model in DEMO:
            from .. import demo

            made: Any = demo.model()
            dtype = None if self.dtype == "auto" else getattr(torch, self.dtype)
            return made.to(device=self.device or _device(), dtype=dtype).eval()
        loaded: Any = self._class().from_pretrained(
            self.model,
            revision=self.revision,
            dtype=self.dtype,
            device_map=self.device_map or self.device or _device(),
            trust_remote_code=self.trust_remote_code,
        )
        return loaded.eval()

    def load_tokenizer(self) -> Any:
        """The tokenizer."""
        if self.tokenizer is None and self.model in DEMO:
            from .. import demo

            return demo.tokenizer()
        return AutoTokenizer.from_pretrained(
            self.tokenizer or self.model, revision=self.revision, trust_remote_code=self.trust_remote_code
        )

    def outline(self) -> Any:
        """The model without weights: its modules on the meta device."""
        if self.model in DEMO:
            from .. import demo

            held: Any = demo.model()
            return held.to("meta")
        config = self._config()
        kind = self._class()
        with torch.device("meta"):
            make = getattr(kind, "_from_config", None) or kind.from_config
            return make(config).eval()

    def _config(self) -> Any:
        return AutoConfig.from_pretrained(
            self.model, revision=self.revision, trust_remote_code=self.trust_remote_code
        )

    def _class(self) -> Any:
        """The class that the checkpoint names, if it generates; else what transformers takes for it."""
        if find_adapter_config_file(self.model, revision=self.revision) is not None:
            return AutoModelForCausalLM
        names = getattr(self._config(), "architectures", None) or ()
        found = [getattr(transformers, name, None) for name in names]
        own = [kind for kind in found if isinstance(kind, type) and issubclass(kind, GenerationMixin)]
        return own[0] if own else AutoModelForCausalLM


def _device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"
