"""The adapters that a request has, from what its caller wrote."""

from __future__ import annotations

from typing import Any

from ...model.adapters.invocation import start_of
from ...model.adapters.tasks import task_of, tasks_of
from ...model.adapters.virtual import ChosenAdapters
from ...scheduling import AdapterNames
from ..requests.params import RequestParams
from .adapters import ACTIVE, EngineAdapters


def chosen_adapters(
    adapters: EngineAdapters, wanted: Any, params: RequestParams, task: Any
) -> ChosenAdapters:
    """The adapters of a request, from what its caller wrote; raises ValueError for what is not there."""
    virtual = virtual_of(adapters, wanted)
    if virtual is not None:
        return ChosenAdapters(virtual=adapters.contents.virtual.of(virtual, task))
    names = adapters.resolve(wanted)
    if adapters.contents.apart(names):
        return _apart(adapters, names, params, task)
    if task is not None:
        raise ValueError(f"task_ids={task!r}: only a multitask prompt and Poly have tasks; leave it out")
    return _begun(adapters, names, params)


def _apart(adapters: EngineAdapters, names: AdapterNames, params: RequestParams, task: Any) -> ChosenAdapters:
    """Adapters that peft's own modules compute, with the task of the request."""
    contents = adapters.contents
    of_tasks = [name for name in names if tasks_of(contents.config(name)) is not None]
    found = [task_of(contents.config(name), name, task) for name in of_tasks or names[:1]]
    whole = next((name for name in names if contents.is_whole(name)), None)
    if whole is not None and params.beams > 1:
        raise ValueError(
            f"adapter={whole!r} with num_beams={params.beams}: it takes the mean of all beams, which the "
            "engine computes one by one; use generate()"
        )
    if of_tasks and params.media is not None:
        raise ValueError(
            f"adapter={of_tasks[0]!r} computes tasks, which pictures and recordings have none of"
        )
    return _begun(adapters, names, params)._replace(
        task=-1 if found[0] is None else found[0], whole=whole is not None
    )


def vocabulary_of(adapters: EngineAdapters, wanted: Any) -> int | None:
    """How many tokens a request knows, from what its caller wrote for its adapters; None for the model's, and
    for adapters that are not there.
    """
    contents = adapters.contents
    names = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, (list, tuple)) else []
    if wanted == ACTIVE:
        names = contents.in_model.active if contents.vocabularies.by_name else ()
    return contents.vocabulary([name for name in names if isinstance(name, str)])


def virtual_of(adapters: EngineAdapters, wanted: Any) -> str | None:
    """The adapter of virtual tokens that a request has, if it has one."""
    if isinstance(wanted, str) and wanted == ACTIVE:
        return adapters.contents.virtual.active
    names = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, (list, tuple)) else []
    found = next((each for each in names if each in adapters.contents.virtual), None)
    if found is not None and len(names) > 1:
        others = ", ".join(repr(name) for name in names if name != found)
        raise ValueError(
            f"{found!r} is virtual tokens in front of a prompt, and cannot be active together with "
            f"{others}; name one of them"
        )
    if found in adapters.leaving:
        raise ValueError(f"the adapter {found!r} is being removed")
    return found


def _begun(adapters: EngineAdapters, names: AdapterNames, params: RequestParams) -> ChosenAdapters:
    """The adapters of a prompt: an aLoRA begins with its invocation tokens, and without them the model
    computes alone.
    """
    late = next((name for name in names if adapters.contents.invocation(name)), None)
    if late is None:
        return ChosenAdapters(names)
    if len(names) > 1:
        others = ", ".join(repr(name) for name in names if name != late)
        raise ValueError(
            f"{late!r} is an aLoRA, which begins at its invocation tokens, and cannot be active together "
            f"with {others}; name one of them"
        )
    if not adapters.contents.only_products(late):
        raise ValueError(
            f"adapter={late!r}: an aLoRA with other parts than low-rank products of linear layers, which are "
            "active before its invocation tokens, too; use generate()"
        )
    if params.media is not None and _encodes(adapters, late):
        raise ValueError(
            f"adapter={late!r}: an aLoRA of layers that encode pictures or recordings, and peft computes "
            "the last of their tokens with it; train it on the text model alone, or use generate()"
        )
    ids = () if params.source is not None else params.ids  # peft looks for no place in an encoder's
    start = start_of(ids, adapters.contents.invocation(late))
    return ChosenAdapters() if start is None else ChosenAdapters(names, start)


def _encodes(adapters: EngineAdapters, name: str) -> bool:
    """True if an adapter that kernels compute changes layers outside of the text model."""
    own = adapters.contents.own.get(name)
    adapter: Any = adapters.contents.read(name) if own is None else own.host
    model: Any = adapters.model
    text = {id(each) for each in (*model.get_decoder().modules(), model.get_output_embeddings())}
    return any(id(layer) not in text for layer in adapter.layers)
