"""The command `hf-paged batch`: a file of OpenAI's batch requests in, a file of their answers out."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from hf_paged_cli.limits import ServerLimits

from ..engine.batches import model_digest
from ..engine.outputs.answer_file import AnswerFile
from ..engine.requests.content import digest_of
from ..model.loading import is_watched
from .arguments import adapter_sources, interrupted, require_out, source_of
from .serve import chat_template_of, engine_of, engine_options, response_template_of

NO_LIMIT = 2**31
"""Of requests that wait, and of their seconds: no other client does."""


def run(given: Namespace) -> int:
    """Answer all lines. The answer is the exit code: 1 if any has no complete answer."""
    try:
        from ..serve.batches import BatchRun, reader
        from ..serve.http.options import ServerOptions
        from ..serve.link.in_process import connected
        from ..serve.openai.service import Service
    except ImportError as error:
        raise ImportError(f"batches need {error.name}: pip install 'hf_paged[serve]'") from error
    require_out(given)
    if not Path(given.file).is_file():
        raise ValueError(f"there is no file {given.file}; give one with a request on each line")
    source = source_of(given)
    options = ServerOptions(
        names=tuple(given.served_model_name or [source.name]),
        allowed_media_domains=tuple(given.allowed_media_domains),
        max_model_len=given.max_model_len,
        limits=ServerLimits(waiting=NO_LIMIT, request_seconds=NO_LIMIT),
    )
    engine_options(given)  # what contradicts itself is refused before anything starts
    modules = adapter_sources(given.lora_modules, options.names)
    tokenizer = source.load_processor()
    templates = chat_template_of(given, tokenizer), response_template_of(given)
    with engine_of(given, source, {}, modules) as engine:
        adapters = {name: info.digest for name, info in engine.adapters().items()}
        made_by = digest_of([model_digest(engine.model, tokenizer), *templates, adapters])[:8]
        file = AnswerFile(given.out, reader(made_by), given.overwrite)
        batch = BatchRun(
            Service.of(connected(engine, tokenizer), tokenizer, options, *templates), file, made_by
        )
        try:
            batch.answer(given.file, progress=is_watched())
        except KeyboardInterrupt:
            print(interrupted(given.out), file=sys.stderr)
            raise
        except RuntimeError as error:
            print(f"hf-paged batch: {error}", file=sys.stderr)
            return 1
    print(f"{given.out}: {batch.summary}", file=sys.stderr)
    return int(batch.failed > 0)
