"""The sums, tokens and errors of several ranks: `rank_cases.py FOLDER [2:swap 3:peft_models ...]`.

Each case leaves a line. The subjects below have the cases, rank_names.py their order.

Ranks are forks of one process, which imports for all of them; or processes of torchrun, as a device needs it.

The reference is the same engine, or generate(), on the whole model in rank 0's own process, on its CPU. Where
there are CUDA devices each rank has one, and its steps are captured:

    export PYTHONPATH=.:kernels:tests:tests/support
    python -c "import pathlib, rank_models; rank_models.save(pathlib.Path('models'))"
    torchrun --nproc-per-node 2 tests/support/rank_cases.py models
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import rank_adapters
import rank_batches
import rank_bytes
import rank_captures
import rank_engines
import rank_failures
import rank_generate
import rank_inputs
import rank_memory
import rank_steps
import rank_sums
import rank_together
import rank_weights
import torch
import torch.distributed as dist
from _pytest.outcomes import Skipped
from rank_models import DIVIDED, SHOWN
from rank_names import CASES
from rank_support import BACKEND, CUDA, FOLDER, whole
from releases import OLD_RANKS, skipping_refused

SUBJECTS = (
    rank_steps,
    rank_captures,
    rank_sums,
    rank_inputs,
    rank_weights,
    rank_memory,
    rank_bytes,
    rank_engines,
    rank_adapters,
    rank_generate,
    rank_batches,
    rank_together,
    rank_failures,
)
"""All are imported before the fork. A case is a function of one of them, by its name."""
NEWER = {
    rank_captures.__name__, rank_sums.__name__, rank_batches.__name__, "forwards_of_divided_layers",
    "pictures_in_captured_steps", "blocks_that_rank_0_drops", "corrupted_blocks", "no_memory_for_a_capture_on_one_rank",
    "what_ranks_do_in_a_pause", "captured_steps_of_generate", "a_streamer_on_one_rank", "sums_of_different_things",
    "messages_of_the_user", "two_models_in_two_threads", "rank_0_that_ends_at_once",
}  # fmt: skip
"""Cases, and modules of them, with captured steps, prefixes that idle engines keep, or managers of generate_batch."""


def case(name: str) -> Callable[[int], None]:
    """The function of this name that a subject defines, and does not only import."""
    for subject in SUBJECTS:
        function = getattr(subject, name, None)
        if getattr(function, "__module__", None) == subject.__name__:
            return function
    raise LookupError(f"no case {name!r} in {', '.join(subject.__name__ for subject in SUBJECTS)}")


def fork() -> None:
    """Run every rank in a fork of this process, which has imported all and made the models; wait for all."""
    words = sys.argv[2:] or [f"{size}:{name}" for size, name, _ in CASES]
    wanted: dict[int, list[str]] = {}
    for size, _, name in (each.partition(":") for each in words):
        wanted.setdefault(int(size), []).append(name)
    for name in (*DIVIDED, *SHOWN):
        if not (FOLDER / name).exists():
            whole(name).save_pretrained(FOLDER / name)
    gc.collect()
    gc.freeze()  # else every collection of a fork walks, and copies, all that was imported
    context = multiprocessing.get_context("fork")
    for size, names in wanted.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        ranks = [context.Process(target=_forked, args=(rank, size, names)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()


def _forked(rank: int, size: int, names: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    main(names)


def main(wanted: list[str]) -> None:
    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for name in wanted:
        begin = time.monotonic()
        trouble = refused = None
        try:
            if not dist.is_initialized():
                dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
            if OLD_RANKS and {name, case(name).__module__} & NEWER:
                raise Skipped(
                    "ranks of transformers 5.9 have hooks that captured steps do not know, and no managers of ours"
                )
            with skipping_refused():
                case(name)(dist.get_rank())
        except Skipped as reason:  # by an older release, on all ranks
            refused = str(reason)
        except BaseException:
            trouble = traceback.format_exc()
        seconds = time.monotonic() - begin
        line = {"case": name, "trouble": trouble, "refused": refused, "seconds": seconds}
        with (FOLDER / f"ranks-{size}-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if trouble is not None:
            print(os.environ["RANK"], name, trouble, file=sys.stderr, flush=True)
            break  # the others wait in a place of their own


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[2:] or [name for size, name, _ in CASES if size == int(os.environ["WORLD_SIZE"])])
    else:
        fork()
