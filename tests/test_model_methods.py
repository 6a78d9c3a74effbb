"""hf_paged.model.methods: another transformers is refused before anything is computed."""

from __future__ import annotations

import pytest

from hf_paged.model.methods import check_methods


@pytest.mark.parametrize("name", ["_prepare_generation_config", "_prepare_nothing"])
def test_methods_with_other_parameters_are_refused(name: str) -> None:
    check_methods({"_prepare_generation_config": ["generation_config"]})
    with pytest.raises(ImportError, match=rf"expects GenerationMixin\.{name}\('other',\) .*5\.9 on"):
        check_methods({name: ["other"]})
