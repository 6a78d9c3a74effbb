"""The engine for many steps on too few blocks, with aborts and faults at random: who comes through is right,
and nothing leaks.

    OMP_NUM_THREADS=1 PYTHONPATH=.:kernels python scripts/soak.py --steps 20000

A tiny model with full and windowed layers; requests of all kinds (greedy, draws, samples, beams), prompts
that begin alike. At random they are cancelled, their processors raise (exceptions, and what is none:
asyncio.CancelledError, SystemExit), the forward of all raises, a copy to the host raises, Ctrl-C comes in the
middle of a step or at any moment of it or of a submit(), the process forks and the child goes on with both
the engine and paged generate(), the engine is paused. Every answer is compared with that of an engine in
which the request is alone; the books are recounted all the time. Exit status 1 if anything was wrong.

With --adapters requests have LoRA adapters, or several or none. These are switched, trained (with the engine
paused and without), scaled, deleted and made again while requests wait and run; some are the engine's own and
come and go. peft's own code computes what the answers are compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import gc
import itertools
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from typing import Any

import psutil
import torch
from transformers import GenerationConfig, LogitsProcessor, Qwen2Config, Qwen2ForCausalLM

from hf_paged import Engine
from hf_paged.kv import HostBlocks

VOCABULARY = 96
KINDS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.3},
    {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": False, "num_beams": 3},
]
BLIND = 3
"""So many of them do not need the host for their next token, so the engine may run ahead of it."""
ADAPTERS: list[Any] = ["a", "b", "c", "x", "y", None, ["a", "b"], ["b", "x"], "active"]
"""What requests ask for: a, b and c are the model's, x and y the engine's own."""
TARGETS = {
    "a": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "b": ["q_proj", "down_proj"],
    "c": ["v_proj"],
}
VERSIONS = 3
"""Contents that an adapter takes in turn."""
PREEMPTION = ("swap", "recompute", "auto")


class Fault(Exception):
    """What this script breaks on purpose."""


OWN = (Fault, asyncio.CancelledError, GeneratorExit, SystemExit, KeyboardInterrupt)
"""What requests' own code raises."""


class Raises(LogitsProcessor):
    """A processor that fails after some calls."""

    def __init__(self, after: int, kind: type[BaseException]) -> None:
        self.left, self.kind = after, kind

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.kind("a processor")
        return scores


def tiny() -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=256, **sizes, **window)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


class Adapters:
    """The adapters of a model, what they are now, and what peft alone answers with them."""

    def __init__(self, model: Any, rng: random.Random) -> None:
        import peft

        self.rng = rng
        self.peft = peft
        configs = {
            name: peft.LoraConfig(r=rank, lora_alpha=16, target_modules=TARGETS[name])
            for name, rank in (("a", 4), ("b", 3), ("c", 17))
        }
        self.configs = configs
        self.model = peft.get_peft_model(model, configs["a"], adapter_name="a")
        for name in ("b", "c"):
            self.model.add_adapter(name, configs[name])
        self.model.eval()
        self.states = {
            name: [self._drawn(name) for _ in range(VERSIONS)] for name in ("a", "b", "c", "x", "y")
        }
        self.versions = dict.fromkeys(self.states, 0)
        for name in configs:
            self.write(name)
        self.layers = [module for module in self.model.modules() if hasattr(module, "lora_A")]
        # A copy of which peft's own code computes everything: a layer's forward was replaced.
        self.reference = copy.deepcopy(self.model)
        layer = next(module for module in self.reference.modules() if hasattr(module, "lora_A"))
        own = layer.forward
        layer.forward = lambda *arguments, **keywords: own(*arguments, **keywords)
        self._right: dict[Any, list[list[int]]] = {}

    def config(self, name: str) -> Any:
        """x and y are like a and b."""
        return self.configs[{"x": "a", "y": "b"}.get(name, name)]

    def _drawn(self, name: str) -> dict[str, torch.Tensor]:
        like = {"x": "a", "y": "b"}.get(name, name)
        state = self.peft.get_peft_model_state_dict(self.model, adapter_name=like)
        return {key: torch.randn_like(tensor) * 0.3 for key, tensor in state.items()}

    def write(self, name: str, silently: bool = False) -> None:
        """Let the model's adapter be what it is by now, in place."""
        state = self.states[name][self.versions[name]]
        for key, tensor in self.model.named_parameters():
            if f".{name}.weight" in key:
                source = state[key.replace(f".{name}.weight", ".weight")]
                with torch.no_grad():
                    (tensor.data if silently else tensor).copy_(source)

    def content(self, names: Any) -> tuple[tuple[str, int], ...]:
        """Which adapters these are, and which content each has now."""
        several = [] if names is None else [names] if isinstance(names, str) else names
        return tuple((name, self.versions[name]) for name in several)

    def right(self, soak: Soak, p: int, k: int, content: tuple[tuple[str, int], ...]) -> list[list[int]]:
        """What peft alone answers with adapters of these contents."""
        if (p, k, content) not in self._right:
            model = self.reference
            names = []
            for place, (name, version) in enumerate(content):
                names.append(f"r{place}")
                if names[-1] in model.peft_config:
                    model.delete_adapter(names[-1])
                model.add_adapter(names[-1], self.config(name))
                self.peft.set_peft_model_state_dict(model, self.states[name][version], adapter_name=names[-1])
            model.eval()
            model.base_model.set_adapter(names or ["a"])
            active = contextlib.nullcontext() if names else model.disable_adapter()
            with active, Engine(model, prefix_caching=False) as alone:
                found = alone.generate(
                    [soak.prompts[p]], seed=1, max_new_tokens=24, progress=False, **KINDS[k]
                )
            self._right[p, k, content] = soak.answers(found[0])
        return self._right[p, k, content]


class Soak:
    """One engine, those who wait for it, and what was seen."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rng, self.seen = random.Random(options.seed), Counter[str]()
        self.model, self.steps, self.audit, self.ahead = (
            tiny(),
            options.steps,
            options.audit,
            options.run_ahead,
        )
        start = [self.rng.randrange(5, VOCABULARY) for _ in range(24)]
        lengths = [(0, 5), (8, 9), (24, 3), (24, 30), (0, 40), (16, 1)]
        self.prompts = [
            start[:same] + [self.rng.randrange(5, VOCABULARY) for _ in range(own)] for same, own in lengths
        ]
        with Engine(self.model, prefix_caching=False) as alone:
            self.right = {
                (p, k): self.answers(
                    alone.generate([prompt], seed=1, max_new_tokens=24, progress=False, **kind)[0]
                )
                for (p, prompt), (k, kind) in itertools.product(enumerate(self.prompts), enumerate(KINDS))
            }
        self.alive: list[tuple[Any, int, int]] = []
        self.asked: dict[int, tuple[Any, set[Any]]] = {}
        """Of requests with adapters: which, and the contents that these have had since."""
        self.leaving: set[str] = set()
        """Those that the engine removes when their requests have ended."""
        self.adapters = Adapters(self.model, self.rng) if options.adapters else None
        self.engine = Engine(
            self.model, max_adapters=options.adapters or 16, block_size=options.block_size, num_blocks=options.blocks, max_batch_tokens=40, max_batch_sequences=16,
            preemption=options.preemption, host_blocks=options.host_blocks, run_ahead=options.run_ahead,
        )  # fmt: skip

    @staticmethod
    def answers(output: Any) -> list[list[int]]:
        return [sequence.token_ids for sequence in output.sequences]

    def submit(self) -> None:
        p, k = self.rng.randrange(len(self.prompts)), self.rng.randrange(BLIND if self.ahead else len(KINDS))
        raises = [Raises(self.rng.randrange(20), self.rng.choice(OWN))]
        faulty = {"logits_processor": raises} if self.rng.random() < 0.1 and not self.ahead else {}
        kind = {**KINDS[k], **faulty}
        if self.adapters is not None:
            kind["adapter"] = self.choose_adapter(self.adapters)
        handle = self.engine.submit(self.prompts[p], seed=1, max_new_tokens=24, **kind)
        if self.adapters is not None:
            names = kind["adapter"]
            names = self.adapters.model.active_adapter if names == "active" else names
            self.asked[id(handle)] = names, {self.adapters.content(names)}
        self.alive.append((handle, p, k))

    # ---- adapters

    def choose_adapter(self, adapters: Adapters) -> Any:
        """One that requests may ask for now."""
        there = self.engine.adapters().keys() - self.leaving
        self.leaving &= self.engine.adapters().keys()
        while True:
            names = self.rng.choice(ADAPTERS)
            several = [] if names in (None, "active") else [names] if isinstance(names, str) else names
            if there.issuperset(several):
                return names

    def disturb(self, adapters: Adapters) -> None:
        """Something happens to an adapter, between two steps."""
        what = self.rng.choice(["switch", "train", "paused", "remove", "add", "delete", "again"])
        name = self.rng.choice("abc")
        there = self.engine.adapters()
        if what == "switch" and name in there:
            adapters.model.set_adapter(name)
        elif what in ("train", "paused") and name in there:
            self.train(adapters, name, what == "paused")
        elif what == "delete" and name == "c" and name in there and adapters.model.active_adapter != name:
            adapters.model.delete_adapter("c")
        elif what == "again" and "c" not in there:
            adapters.model.add_adapter("c", adapters.config("c"))
            adapters.model.eval()
            self.change(adapters, "c")
            adapters.write("c")
        elif what == "add" and not {"x", "y"} <= there.keys():
            name = self.rng.choice(sorted({"x", "y"} - there.keys()))
            self.change(adapters, name)
            state = adapters.states[name][adapters.versions[name]]
            self.engine.add_adapter(name, state, adapters.config(name))
            self.leaving.discard(name)
        elif what == "remove" and {"x", "y"} & there.keys():
            name = self.rng.choice(sorted({"x", "y"} & there.keys()))
            self.leaving.add(name)
            self.engine.remove_adapter(name, when="idle")
        else:
            return
        self.seen[f"adapters: {what}"] += 1

    def train(self, adapters: Adapters, name: str, paused: bool) -> None:
        """Its requests that run end, or with a pause go on with other weights."""
        if paused:
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                self.engine.pause()
        self.change(adapters, name, mixes=paused)
        adapters.write(name, silently=paused)
        if paused:
            self.engine.resume()

    def change(self, adapters: Adapters, name: str, mixes: bool = False) -> None:
        """Another content from now on."""
        adapters.versions[name] = (adapters.versions[name] + 1) % VERSIONS
        for names, contents in self.asked.values():
            if names is not None and name in names:
                contents.add("mixed" if mixes else adapters.content(names))

    def expected(self, handle: Any, p: int, k: int) -> list[list[list[int]]] | None:
        """The answers that a request may have; None if it may mix weights."""
        if self.adapters is None:
            return [self.right[p, k]]
        _, contents = self.asked.pop(id(handle))
        if "mixed" in contents:
            return None
        return [self.adapters.right(self, p, k, content) for content in contents]

    def excused(self, error: Exception) -> bool:
        """Whether a request may end so when its adapter changes."""
        return self.adapters is not None and any(
            why in str(error) for why in ("have changed while", "was deleted while")
        )

    def step(self) -> None:
        """A step, in which something may be broken on purpose."""
        trouble = self.rng.choices(
            ["none", "forward", "interrupt", "out", "back", "signal", "fork"], [948, 10, 10, 10, 10, 10, 2]
        )[0]
        error = KeyboardInterrupt("on purpose") if trouble == "interrupt" else Fault(trouble)
        targets: dict[str, tuple[Any, str]] = {
            "forward": (self.model.lm_head, "forward"),
            "interrupt": (self.model.model.norm, "forward"),
            "out": (HostBlocks, "out"),
            "back": (HostBlocks, "back"),
        }
        if trouble in ("none", "signal", "fork"):
            {"none": self.step_on, "signal": self.step_under_signals, "fork": self.fork}[trouble]()
            return
        owner, name = targets[trouble]
        kept = getattr(owner, name)
        left = self.rng.randrange(2)

        def breaks(*arguments: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                self.seen[f"broken: {trouble}"] += 1
                raise error
            return kept(*arguments, **keywords)

        setattr(owner, name, breaks)
        try:
            self.engine.step()
        except (Fault, KeyboardInterrupt, SystemExit) as found:
            if isinstance(found, Fault) and found is not error:
                raise
            self.seen["broke into the caller"] += 1
        finally:
            setattr(owner, name, kept)

    def step_on(self) -> None:
        """A step; an interrupt of a request's own code reaches the driver."""
        try:
            self.engine.step()
        except (KeyboardInterrupt, SystemExit):
            self.seen["reached the driver"] += 1

    def step_under_signals(self) -> None:
        """A request and steps, and Ctrl-C at some moment of them."""

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            try:
                signal.setitimer(
                    signal.ITIMER_REAL, self.rng.uniform(1e-5, 5e-3), 0.1
                )  # again, if a finalizer swallows it
                self.submit()
                while True:
                    self.engine.step()
            except (KeyboardInterrupt, SystemExit):
                self.seen["broken: signal"] += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    def fork(self) -> None:
        """A child that computes what it has inherited, and more."""
        self.seen["forks"] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            self.seen["WRONG forks"] += status != 0
            return
        wrong = 1
        try:
            signal.alarm(120)
            while self.engine.driver.books.busy:
                self.step_on()
            self.collect()
            ids = torch.tensor([self.prompts[0]])
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
            with contextlib.nullcontext() if self.adapters is None else self.adapters.model.disable_adapter():
                whole = self.model.generate(ids, **options, cache_implementation="paged")
            paged = whole[0, ids.shape[1] :].tolist()
            self.engine.check()
            wrong = int(paged != self.right[0, 0][0] or any(name.startswith("WRONG") for name in +self.seen))
        finally:
            os._exit(wrong)

    def collect(self) -> None:
        for each in [each for each in self.alive if each[0].done]:
            self.alive.remove(each)
            handle, p, k = each
            output = handle.result()
            self.seen[f"ended: {output.finish_reason}"] += 1
            if (
                output.error is not None
                and not isinstance(output.error, OWN)
                and "broke off" not in str(output.error)
                and not self.excused(output.error)
            ):
                self.seen["WRONG errors"] += 1
                print(f"request {handle.number}: {output.error!r}")
            if isinstance(output.error, RuntimeError) and self.excused(output.error):
                self.seen["adapters: ended"] += 1
            expected = self.expected(handle, p, k)
            whole = output.finish_reason in ("stop", "length")
            if whole and expected is not None and self.answers(output) not in expected:
                self.seen["WRONG answers"] += 1
                print(f"request {handle.number}: {self.answers(output)}, expected one of {expected}")
        if self.adapters is not None and any("forward" in layer.__dict__ for layer in self.adapters.layers):
            self.seen["WRONG forwards"] += 1

    def run(self) -> None:
        """So many steps of the scheduler, and then until nobody waits."""
        counts = self.engine.scheduler.counts
        while counts["steps"] < self.steps or self.alive:
            more = counts["steps"] < self.steps
            if more and len(self.alive) < 14 and self.rng.random() < 0.5:
                self.submit()
            if self.alive and self.rng.random() < 0.02:
                self.rng.choice(self.alive)[0].cancel()
                self.seen["cancelled"] += 1
            if self.rng.random() < 0.005:
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self.engine.pause()
                self.engine.resume()
                self.seen["paused"] += 1
            if self.adapters is not None and self.rng.random() < 0.05:
                self.disturb(self.adapters)
            self.step()
            self.seen["turns"] += 1
            self.collect()
            if self.seen["turns"] % self.audit == 0:
                self.engine.check()
            if self.seen["turns"] % 1000 == 0:
                print(f"{counts['steps']} steps", file=sys.stderr, flush=True)
        while self.engine.driver.books.busy:  # requests whose submit() was interrupted
            self.step_on()
        self.engine.check()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000, help="of the scheduler")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=70)
    parser.add_argument("--host-blocks", type=int, help="as the engine's option")
    parser.add_argument("--preemption", choices=PREEMPTION, default="swap")
    parser.add_argument(
        "--run-ahead", action="store_true", help="as the engine's option, with requests that allow it only"
    )
    parser.add_argument("--adapters", type=int, help="slots of adapters; without it no request has any")
    parser.add_argument("--audit", type=int, default=1, help="turns between two audits of the books")
    options = parser.parse_args()
    begin, process = time.monotonic(), psutil.Process()
    soak = Soak(options)
    before = process.memory_info().rss
    soak.run()
    stats = soak.engine.stats()
    held = sum(kind["held"] for kind in [*stats["blocks"].values(), *stats["host"].values()])
    gc.collect()
    for name in (
        "steps",
        "tokens",
        "admissions",
        "preemptions",
        "swapped_out",
        "swapped_in",
        "recomputed",
        "blocks_out",
        "blocks_in",
    ):
        print(f"{name:24}{stats[name]}")
    for name, count in sorted(soak.seen.items()):
        print(f"{name:24}{count}")
    print(f"{'blocks still held':24}{held}")
    print(f"{'memory, MB':24}{before / 1e6:.0f} before, {process.memory_info().rss / 1e6:.0f} after")
    print(f"{'seconds':24}{time.monotonic() - begin:.0f}")
    soak.engine.close()
    wrong = sum(count for name, count in soak.seen.items() if name.startswith("WRONG"))
    if wrong or held:
        sys.exit("something was wrong")


if __name__ == "__main__":
    main()
