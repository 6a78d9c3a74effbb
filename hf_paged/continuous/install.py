"""The plug of continuous batching: who computes `model.generate_batch`."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

from ..engine import EngineConfig
from ..engine.parallel import why_not_on_ranks
from ..generate.install import install_cache, uninstall_cache
from ..model.caller import caller_level
from ..model.ranks.tensor_parallel import mesh_of
from ..model.registry import base_model
from ..model.support import FallbackWarning
from .engines import with_budgets
from .options import WorkloadNeed, options_of_config

if TYPE_CHECKING:
    from .following import FollowingBatchingManager
    from .manager import EngineBatchingManager

METHOD = "init_continuous_batching"
CACHED = "_cached_continuous_batching_manager"


def install(generate_batch: bool | None = None) -> None:
    """Make "paged" a cache of generate(), as `import hf_paged` does. Doing it twice does nothing.

    generate_batch: whether the engine computes `model.generate_batch` and transformers' manager of continuous
    batching, too (`transformers serve --continuous-batching`, TRL's use_transformers_continuous_batching).
    None leaves that as it is; at first transformers computes them.
    """
    if generate_batch not in (None, True, False):
        raise TypeError(f"generate_batch must be True, False or None, got {generate_batch!r}")
    install_cache()
    if generate_batch is None:
        return
    current = getattr(ContinuousMixin, METHOD)
    original = getattr(current, "hf_paged_original", None)
    if generate_batch and original is None:
        setattr(ContinuousMixin, METHOD, _wrap(current, _managers()))
    elif not generate_batch and original is not None:
        setattr(ContinuousMixin, METHOD, original)


def uninstall() -> None:
    """Restore transformers' own methods. `install()` puts hf_paged's back."""
    original = getattr(getattr(ContinuousMixin, METHOD), "hf_paged_original", None)
    if original is not None:
        setattr(ContinuousMixin, METHOD, original)
    uninstall_cache()


def transformers_main() -> None:
    """Run transformers' command line on the arguments behind the first, with continuous batching on the
    engine.
    """
    from transformers.cli.transformers import main

    install(generate_batch=True)
    del sys.argv[1]
    main()


class Managers(NamedTuple):
    """The classes of managers: that of rank 0 and of a single process, and that of the other ranks."""

    leading: type[EngineBatchingManager]
    following: type[FollowingBatchingManager]


def _managers() -> Managers:
    """Import them: before 5.14 transformers has no managers of their form."""
    try:
        from .following import FollowingBatchingManager
        from .manager import EngineBatchingManager
    except ImportError as error:
        raise ImportError(
            f"install(generate_batch=True) needs the managers of transformers 5.14 or newer, found "
            f"{transformers.__version__} ({error}); upgrade transformers, or use hf_paged.Engine"
        ) from error
    return Managers(EngineBatchingManager, FollowingBatchingManager)


def _wrap(stock: Callable[..., Any], managers: Managers) -> Callable[..., Any]:
    @functools.wraps(stock)
    def init_continuous_batching(
        self: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Any:
        cached = getattr(self, CACHED, None)
        if isinstance(cached, managers.leading):
            return cached
        generation = self.generation_config if generation_config is None else generation_config
        config = continuous_batching_config or getattr(generation, "continuous_batching_config", None)
        config = ContinuousBatchingConfig() if config is None else config
        mesh = mesh_of(self)
        reason = None if mesh is None else _why_not_on_ranks(self, config, workload_hints)
        if reason is not None:
            words = f"install(generate_batch=True): {reason}; transformers' own manager is used"
            warnings.warn(words, FallbackWarning, stacklevel=caller_level())
            return stock(self, generation_config, continuous_batching_config, workload_hints)
        follows = mesh is not None and mesh.get_local_rank() > 0
        manager = managers.following if follows else managers.leading
        return manager(base_model(self), generation, config, workload_hints)

    init_continuous_batching.hf_paged_original = stock  # type: ignore[attr-defined]  # a mark of ours
    return init_continuous_batching


def _why_not_on_ranks(model: Any, config: ContinuousBatchingConfig, hints: Any) -> str | None:
    options = with_budgets(options_of_config(config), WorkloadNeed.of(hints))
    return why_not_on_ranks(base_model(model), EngineConfig.of(None, options))
