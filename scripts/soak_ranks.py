"""Break ranks of a tensor-parallel engine at random: raise, hang or kill one in the middle of its work, again and
again, and see that all others end with one clear error, soon.

    scripts/environment; .venv/bin/python scripts/soak_ranks.py --rounds 20        # on CPUs, some 15 s each

Each round starts ranks anew, breaks one of them in a random forward, and counts how the others have ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 90
"""Seconds that a round may take, start included."""
SOON = 8.0
"""Seconds from the fault to the last error."""
TIMEOUT = 5.0
"""The engines' rank_timeout."""


def rank(folder: Path, victim: int, fault: str, forward: int) -> None:
    """One rank of a round: what it ends with goes to its file."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end the others before they say anything
    import torch
    from transformers import LlamaForCausalLM

    from hf_paged.engine import Engine, RankError

    model = LlamaForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    own = int(os.environ["RANK"])
    engine = Engine(model, block_size=4, num_blocks=40, max_batch_tokens=16, rank_timeout=TIMEOUT)
    forward += 20  # behind the trial
    mlp = model.model.layers[0].mlp
    whole = mlp.forward
    count = [0]

    def broken(states: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if own == victim and count[0] == forward:
            (folder / "fault").write_text(str(time.time()))
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise ValueError("broken on purpose")
            time.sleep(TIMEOUT + 3)
        return whole(states)

    mlp.forward = broken
    error = "none"
    try:
        if engine.leads:
            for _ in range(50):
                prompts = [[5 + (i * 7 + row) % 90 for i in range(5 + 9 * row)] for row in range(6)]
                options = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "num_return_sequences": 2}
                engine.generate(prompts, progress=False, strict=True, **options)
        else:
            engine.follow()
    except RankError as trouble:
        error = str(trouble)
    engine.close()
    found = {"rank": own, "error": error, "at": time.time()}
    (folder / f"rank-{own}").write_text(json.dumps(found))


def make_model(folder: Path) -> None:
    """A tiny model that two and three ranks divide."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=96,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")


def one_round(chance: random.Random) -> str | None:
    """Break a rank: what is wrong with how the others ended, or None."""
    size = chance.choice([2, 3])
    victim = chance.randrange(size)
    fault = chance.choice(["raise", "hang", "kill"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        program = [__file__, "--rank", name, str(victim), fault, str(chance.randrange(1, 60))]
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        what = f"{fault} rank {victim} of {size}"
        try:
            command = [*launch, *rendezvous, *program]
            subprocess.run(command, env=environment, timeout=LIMIT, capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            return f"{what}: the ranks hang"
        begin = float((folder / "fault").read_text()) if (folder / "fault").exists() else None
        if begin is None:
            return f"{what}: the fault never came"
        others = [each for each in range(size) if each != victim or fault != "kill"]
        missing = [each for each in others if not (folder / f"rank-{each}").exists()]
        if missing:
            return f"{what}: ranks {missing} left no error"
        ends = [json.loads((folder / f"rank-{each}").read_text()) for each in others]
        errors = {each["error"] for each in ends}
        late = max(each["at"] for each in ends) - begin
        print(f"{what}: {late:.1f} s, {sorted(errors)}", flush=True)
        if len(errors) != 1 or "none" in errors:
            return f"{what}: {errors}"
        return None if late < SOON + TIMEOUT else f"{what}: after {late:.1f} s only"


def main() -> int:
    """Run rounds; the exit code is whether all ended well."""
    if sys.argv[1:2] == ["--rank"]:
        folder, victim, fault, forward = sys.argv[2:]
        rank(Path(folder), int(victim), fault, int(forward))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    wrong = [trouble for _ in range(options.rounds) if (trouble := one_round(chance))]
    print("\n".join([f"{options.rounds} rounds, {len(wrong)} wrong", *wrong]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
