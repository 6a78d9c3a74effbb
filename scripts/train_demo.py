"""Trains the demo model that hf_paged.demo loads: from scripts/demo_corpus.txt to hf_paged/demo/data, in one
command.

    python scripts/train_demo.py

The corpus holds little stories and a grammar that makes more of them. The data folder that comes out stays
under LIMIT bytes. A run on one thread with the same seed and the same versions of torch and tokenizers gives
the same files.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "demo_corpus.txt"
DATA = HERE.parent / "hf_paged" / "demo" / "data"

LIMIT = 1_000_000  # bytes of the whole data folder
SEED = 20
STEPS = 1500
ROW_TOKENS = 2048  # tokens of one step, whatever the length of its rows
SHORT, LONG = 256, 1024  # row lengths; LONG is the context that the model promises
LONG_EVERY = 4
PEAK_RATE = 6e-3
WARMUP = 50

BOS, EOS, PAD, USER, ASSISTANT, SYSTEM = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
SPECIAL = [BOS, EOS, PAD, USER, ASSISTANT, SYSTEM]
VOCAB = 848
# The reply begins right after its role token and ends with EOS: the same text that `chat` below trains on. Tools are a
# system message of their names and parameters, and their results are a user's; the model has learned neither.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>Tools: {% for tool in tools %}{% set function = tool['function'] %}"
    "{{ function['name'] }}({{ (function['parameters'] or {}).get('properties', []) | join(', ') }})"
    "{{ ', ' if not loop.last }}{% endfor %}.{{ eos_token }}{% endif %}{% for message in messages %}"
    "{% set role = 'user' if message['role'] == 'tool' else message['role'] %}"
    "{{ '<|' + role + '|>' + (message['content'] or '') }}{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}{% endfor %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# How transformers reads calls of tools in a reply that is written as the template writes them.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": EOS, "content": "text"},
    },
}

PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}


@dataclass(frozen=True)
class Noun:
    """Someone or something that a story is about, and the words that refer to it."""

    name: str
    he: str = "it"
    home: str = ""
    kind: str = ""

    def word(self, form: str) -> str:
        """The word for this noun in a slot: 'an' is the noun with its article, the others are as in the
        cast.
        """
        if form in ("he", "him", "his"):
            return PRONOUNS[self.he][("he", "him", "his").index(form)]
        if form == "an":
            return ("an " if self.name[0] in "aeiou" else "a ") + self.name
        return {"": self.name, "home": self.home, "kind": self.kind}[form]


@dataclass(frozen=True)
class Corpus:
    """The sections of demo_corpus.txt."""

    stories: list[str]
    cast: list[Noun]
    rules: dict[str, list[str]]
    plots: list[str]
    asks: list[str]
    talks: list[tuple[str, str]]
    systems: list[str]


def split(text: str) -> list[str]:
    """The alternatives of a line, which are separated by bars."""
    return [part.strip() for part in text.split("|")]


def read_corpus(path: Path = CORPUS) -> Corpus:
    """Reads the corpus file; a blank line ends a paragraph, an indented line continues the line before it."""
    parts = re.split(r"^== (\w+)\n", path.read_text("ascii"), flags=re.MULTILINE)
    text = dict(zip(parts[1::2], parts[2::2], strict=True))

    def paragraphs(name: str) -> list[str]:
        return [" ".join(block.split()) for block in re.split(r"\n\n+", text[name]) if block.strip()]

    def lines(name: str) -> list[str]:
        return [line for line in text[name].replace("\n  ", " ").splitlines() if line.strip()]

    rules = dict(line.split(":", 1) for line in lines("rules"))
    return Corpus(
        stories=paragraphs("stories"),
        cast=[Noun(*split(line)) for line in lines("cast")],
        rules={name: split(options) for name, options in rules.items()},
        plots=paragraphs("plots"),
        asks=lines("asks"),
        talks=[(ask, reply) for ask, reply in map(split, lines("talks"))],
        systems=lines("systems"),
    )


class Teller:
    """Tells stories and conversations from a corpus; the same seed tells the same ones."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus = corpus
        self.random = random.Random(seed)

    def bind(self) -> dict[str, Noun]:
        """Chooses who and what one story is about; no two slots of a story share a noun."""
        cast = dict(zip("abc", self.random.sample(self.corpus.cast, 3), strict=True))
        things: dict[str, Noun] = {}
        for slot in ("thing", "food", "place", "weather", "seed", "work", "sound", "wish"):
            first, second = self.random.sample(self.corpus.rules[slot], 2)
            things |= {slot: Noun(first), slot + "2": Noun(second)}
        return cast | things

    def expand(self, plot: str) -> str:
        """Replaces every [rule] and (one|of|these) by a choice; a rule does not repeat a choice while others
        are left.
        """
        left: dict[str, list[str]] = {}

        def rule(match: re.Match[str]) -> str:
            name = match[1]
            if not left.get(name):
                left[name] = self.random.sample(self.corpus.rules[name], len(self.corpus.rules[name]))
            return left[name].pop()

        while re.search(r"\[\w+\]", plot):
            plot = re.sub(r"\[(\w+)\]", rule, plot)
        return re.sub(r"\(([^()]*)\)", lambda match: self.random.choice(match[1].split("|")), plot)

    def fill(self, text: str, nouns: dict[str, Noun]) -> str:
        """Replaces every {slot} and {slot.form}; a capital in the slot makes a capital in the text."""

        def slot(match: re.Match[str]) -> str:
            word = nouns[match[1].lower()].word(match[2] or "")
            return word[0].upper() + word[1:] if match[1][0].isupper() else word

        return " ".join(re.sub(r"\{(\w+)\.?(\w*)\}", slot, text).split())

    def made(self) -> str:
        """A story from the grammar."""
        return self.fill(self.expand(self.random.choice(self.corpus.plots)), self.bind())

    def story(self) -> str:
        """A story from the grammar, or one of those in the corpus."""
        return self.made() if self.random.random() < 0.8 else self.random.choice(self.corpus.stories)

    def named(self, nouns: list[Noun], story: str) -> list[Noun]:
        """Those of the nouns that the story names, in its order."""
        places = {noun: re.search(rf"\b{noun.name.split()[-1]}\b", story) for noun in nouns}
        found = {noun: match.start() for noun, match in places.items() if match}
        return sorted(found, key=lambda noun: found[noun])

    def ask(self, story: str) -> str:
        """A request that the story answers: whom and what it names is in the story."""
        who = self.named(self.corpus.cast, story)
        what = self.named([Noun(name) for name in self.corpus.rules["thing"]], story)
        nouns = {"a": who[:1], "b": who[1:2], "thing": what[:1]}
        known = {slot: one[0] for slot, one in nouns.items() if one}
        fits = [ask for ask in self.corpus.asks if known.keys() >= set(re.findall(r"\{(\w+)", ask))]
        return self.fill(self.random.choice(fits), known) if fits else "Tell me a story."

    def turn(self) -> str:
        """What a user says and what the model answers."""
        if self.random.random() < 0.2:
            ask, reply = self.random.choice(self.corpus.talks)
        else:
            reply = self.story()
            ask = self.ask(reply)
        return f"{USER}{ask}{EOS}{ASSISTANT}{reply}{EOS}"

    def chat(self) -> str:
        """A conversation in the form of CHAT_TEMPLATE, of one to three turns, some with a system message."""
        system = (
            f"{SYSTEM}{self.random.choice(self.corpus.systems)}{EOS}" if self.random.random() < 0.3 else ""
        )
        return BOS + system + "".join(self.turn() for _ in range(self.random.choice((1, 1, 2, 3))))

    def document(self) -> str:
        """One text to train on."""
        return self.chat() if self.random.random() < 0.3 else BOS + self.story() + EOS


def vocabulary(corpus: Corpus) -> set[str]:
    """The words, in lower case, that the stories and conversations of the corpus are made of."""
    nouns = [text for noun in corpus.cast for text in (noun.name, noun.home, noun.kind)]
    rules = [option for options in corpus.rules.values() for option in options]
    texts = [
        *corpus.stories,
        *corpus.plots,
        *rules,
        *nouns,
        *corpus.asks,
        *sum(corpus.talks, ()),
        *corpus.systems,
    ]
    spoken = (re.sub(r"\{\w+\.?\w*\}|\[\w+\]", " ", text) for text in texts)  # a slot's name is not a word
    return {word for text in spoken for word in words(text)} | {"a", "an", *sum(PRONOUNS.values(), ())}


def words(text: str) -> list[str]:
    """The words of a text in lower case, without its special tokens."""
    return re.findall(r"[a-z]+(?:'[a-z]+)*", re.sub(r"<\|\w+\|>", " ", text).lower())


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE: it encodes every text, and most words of the corpus are one token or two."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The untrained Llama: grouped-query attention, rotary positions, one matrix for tokens in and tokens
    out.
    """
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONG,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    return LlamaForCausalLM(config)


def rows(teller: Teller, tokenizer: Tokenizer, length: int, count: int) -> torch.Tensor:
    """`count` rows of documents one after another, each cut at `length` + 1 tokens."""

    def row() -> list[int]:
        ids: list[int] = []
        while len(ids) <= length:
            ids += tokenizer.encode(teller.document(), add_special_tokens=False).ids
        return ids[: length + 1]

    return torch.tensor([row() for _ in range(count)])


def batches(teller: Teller, tokenizer: Tokenizer, steps: int) -> Iterator[torch.Tensor]:
    """The rows of each step; one step in LONG_EVERY has long rows."""
    for step in range(steps):
        length = LONG if step % LONG_EVERY == 0 else SHORT
        yield rows(teller, tokenizer, length, ROW_TOKENS // length)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss per token of predicting each token of the rows from those before it."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def rate(step: int, steps: int) -> float:
    """The learning rate relative to its peak: a short warm-up, then down to nearly nothing along a cosine."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def train(model: LlamaForCausalLM, teller: Teller, tokenizer: Tokenizer, steps: int) -> None:
    """Trains the model in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    start = time.perf_counter()
    model.train()
    for step, ids in enumerate(batches(teller, tokenizer, steps), 1):
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(
                f"step {step} of {steps}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    model.eval()


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that from_pretrained reads, the weights in bfloat16 and the tokenizer without its
    indentation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    model.to(torch.bfloat16).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=LONG,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    fast.save_pretrained(folder)
    rewrite(folder / "tokenizer.json", None)
    rewrite(
        folder / "tokenizer_config.json", 2, tokenizer_class="PreTrainedTokenizerFast"
    )  # its name in every release
    for file in folder.iterdir():
        file.chmod(0o644)  # the weights are saved for their owner only, and a package is read by everyone


def rewrite(file: Path, indent: int | None, **changes: str) -> None:
    """Writes a JSON file again, with changes to its top level; without an indent it is as short as it can
    be.
    """
    separators = (",", ":") if indent is None else (",", ": ")
    content = json.loads(file.read_text("utf-8")) | changes
    file.write_text(json.dumps(content, indent=indent, separators=separators) + "\n", "utf-8")


@torch.no_grad()
def report(folder: Path, corpus: Corpus) -> None:
    """Prints what was saved: its loss on stories it was not trained on, its size, and a few samples of it."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    held_out = rows(Teller(corpus, SEED + 1), tokenizer.backend_tokenizer, SHORT, 64)
    size = folder_bytes(folder)
    print(f"held-out loss {loss_of(model, held_out).item():.3f} per token")
    print(f"{model.num_parameters()} parameters, {size} bytes in {len(list(folder.iterdir()))} files")
    torch.manual_seed(SEED)
    for prompt in ("One morning the fox", "The lighthouse keeper", "Once there was a"):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=200, do_sample=True, top_p=0.95)
        print("\n" + tokenizer.decode(ids[0], skip_special_tokens=True))
    if size > LIMIT:
        raise SystemExit(f"the folder holds {size} bytes, and {LIMIT} are allowed")


def folder_bytes(folder: Path) -> int:
    """The size of all files of a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    """The command: trains, saves and reports."""
    options = argparse.ArgumentParser(description="Train the demo model that hf_paged.demo loads.")
    options.add_argument(
        "--out", type=Path, default=DATA, help="the folder to write (default: the demo's own)"
    )
    options.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    choice = options.parse_args()
    torch.set_num_threads(1)  # sums in the same order on every machine
    corpus = read_corpus()
    teller = Teller(corpus, SEED)
    tokenizer = train_tokenizer([teller.document() for _ in range(6000)] + 3 * corpus.stories)
    model = build_model(tokenizer)
    train(model, teller, tokenizer, choice.steps)
    save(model, tokenizer, choice.out)
    report(choice.out, corpus)


if __name__ == "__main__":
    main()
