"""Eight requests at once on one small model, side by side in the terminal as they grow: greedy, drawn, beams,
with a stop string.

python examples/serve.py [--blocks 40] [--delay 0.03] [--trace steps.jsonl]

With fewer blocks the newest requests are preempted: their panels wait, and their words stay the same. Where the
output is no terminal only the last picture is printed. --trace records every step and draws the owner of each
block in the step that held most.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
import time

from hf_paged import Engine, demo, trace

REQUESTS = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": True, "seed": 1},
    {"do_sample": True, "seed": 2, "temperature": 1.5, "top_p": 0.9},
    {"do_sample": False, "stop_strings": ["."]},
    {"num_beams": 4, "do_sample": False},
    {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    {"do_sample": False, "max_new_tokens": 12},
]
HEIGHT = 11


class Panel:
    """One request's corner of the screen."""

    def __init__(self, engine, prompt, options):
        self.handle = engine.submit(prompt, **{"max_new_tokens": 48, **options})
        self.prompt, self.texts, self.state = prompt, {}, "waiting"
        self.title = (
            ", ".join(f"{name} {value}" for name, value in options.items() if name != "do_sample") or "greedy"
        )

    def look(self):
        """Take what is new."""
        for increment in self.handle.read():
            self.texts[increment.index] = self.texts.get(increment.index, "") + increment.text
            self.state = increment.finish_reason or "running"

    def lines(self, width):
        """What it shows, cut to its place."""
        texts = [self.prompt + text for text in self.texts.values()] or [self.prompt]
        body = [line for text in texts for line in textwrap.wrap(" ".join(text.split()), width)]
        lines = [f"[{self.state}] {self.title}"[:width], *body[: HEIGHT - 2]]
        return [line.ljust(width) for line in lines + [""] * (HEIGHT - len(lines))]


def draw(panels, columns, width):
    """All panels, row by row."""
    for begin in range(0, len(panels), columns):
        for line in zip(*(panel.lines(width) for panel in panels[begin : begin + columns]), strict=True):
            print(" | ".join(line).rstrip())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=int, default=40, help="blocks of 16 tokens for all requests together"
    )
    parser.add_argument(
        "--delay", type=float, default=0.03, help="seconds between two pictures, in a terminal"
    )
    parser.add_argument("--trace", help="a file for the record of every step")
    options = parser.parse_args()
    screen = shutil.get_terminal_size((120, 40)).columns
    columns = 4 if screen >= 110 else 2
    width = screen // columns - 3
    live = sys.stdout.isatty()
    with Engine(
        demo.model(), demo.tokenizer(), num_blocks=options.blocks, max_batch_tokens=64, max_batch_sequences=16
    ) as engine:
        panels = [
            Panel(engine, prompt, request) for prompt, request in zip(demo.prompts(), REQUESTS, strict=True)
        ]
        recorder = engine.trace(options.trace) if options.trace else None
        begin = time.perf_counter()
        while not all(panel.handle.done for panel in panels):
            engine.step()
            for panel in panels:
                panel.look()
            if live:
                print("\033[H\033[J", end="")
                draw(panels, columns, width)
                time.sleep(options.delay)
        seconds = time.perf_counter() - begin
        if not live:
            draw(panels, columns, width)
        stats = engine.stats()
        tokens = sum(
            len(sequence.token_ids) for panel in panels for sequence in panel.handle.result().sequences
        )
        if recorder:
            recorder.close()
            record = trace.read(options.trace)
            print(record, max(record.maps(), key=lambda each: each.step.blocks[0].held), sep="\n")
        print(
            f"{tokens} tokens in {stats['steps']} steps, {seconds:.2f} seconds, {stats['preemptions']} preemptions"
        )


main()
