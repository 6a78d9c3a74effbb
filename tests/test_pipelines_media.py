"""pipeline("automatic-speech-recognition") and pipeline("image-text-to-text"): the same answers as stock's,
on pages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from words_and_pictures import llava, picture

from hf_paged.model.registry import memory_of

WORD = {"cache_implementation": "paged", "cache_config": {"block_size": 4}}
RATE = 16000
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]  # fmt: skip


def both(model: Any, ask: Any) -> tuple[Any, Any]:
    """A pipeline's answers on stock's cache and on pages; the pages are really used."""
    answers = []
    for word in ({}, WORD):
        torch.manual_seed(0)
        answers.append(ask(word))
    assert memory_of(model).bytes
    memory_of(model).check()
    assert memory_of(model).held == 0
    return answers[0], answers[1]


# ---- speech


def whisper_tokenizer() -> Any:
    """Bytes, Whisper's special tokens, and a time stamp for every 0.02 of a window of one second."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    stamps = [f"<|{step * 0.02:.2f}|>" for step in range(51)]
    vocabulary = {token: i for i, token in enumerate([*letters, *SPECIAL, *stamps])}
    tokenizer = tf.WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    tokenizer.add_tokens(stamps)
    return tokenizer


@pytest.fixture(scope="module")
def listener() -> Any:
    """A tiny random Whisper that hears one second at a time, in its pipeline."""
    tokenizer = whisper_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    end = ids["<|endoftext|>"]
    config = tf.WhisperConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=50, max_target_positions=64,
        decoder_start_token_id=ids["<|startoftranscript|>"], eos_token_id=end, bos_token_id=end, pad_token_id=end,
        suppress_tokens=None, begin_suppress_tokens=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    settings = model.generation_config
    settings.no_timestamps_token_id = ids["<|notimestamps|>"]
    settings.lang_to_id = {name: ids[name] for name in ("<|en|>", "<|de|>")}
    settings.task_to_id = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    settings.is_multilingual, settings.prev_sot_token_id = True, ids["<|startofprev|>"]
    settings.suppress_tokens = list(ids.values())[1:-1]
    extractor = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return tf.pipeline(
        "automatic-speech-recognition", model=model, tokenizer=tokenizer, feature_extractor=extractor
    )


def sounds(*seconds: float) -> list[dict[str, Any]]:
    noise = torch.Generator().manual_seed(1)
    waves = [
        torch.randn(int(length * RATE), generator=noise) * torch.linspace(0.1, 1, int(length * RATE))
        for length in seconds
    ]
    return [{"raw": wave.numpy(), "sampling_rate": RATE} for wave in waves]


@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        ((0.9, 0.6), {}),
        ((3.4,), {"return_timestamps": True}),
        ((2.5, 1.7), {"chunk_length_s": 1, "stride_length_s": 0.2}),
    ],
    ids=["short", "long-form", "chunks"],
)
def test_speech(listener: Any, beams: int, seconds: tuple[float, ...], options: dict[str, Any]) -> None:
    """C36: one window, several windows one after the other, and overlapping windows in a batch."""
    call = {"language": "en", "num_beams": beams, "max_new_tokens": 12}

    def ask(word: dict[str, Any]) -> Any:
        return listener(sounds(*seconds), batch_size=2, generate_kwargs={**call, **word}, **options)

    stock, paged = both(listener.model, ask)
    assert stock == paged
    assert any(answer["text"] for answer in paged)


# ---- pictures


@pytest.fixture(scope="module")
def seer() -> Any:
    """A tiny random Llava over the demo's words, in its pipeline."""
    pytest.importorskip("PIL", reason="the pipeline loads pictures with pillow")
    model, processor = llava()
    return tf.pipeline("image-text-to-text", model=model, processor=processor)


@pytest.mark.parametrize(
    "mode",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 1}],
    ids=["greedy", "beams", "sample"],
)
def test_pictures(seer: Any, mode: dict[str, Any]) -> None:
    """Two prompts of different lengths in a batch, each with a picture of its own."""
    text = ["<image> The fox", "<image> One day a little bear went out and"]
    call = {"max_new_tokens": 12, "do_sample": False, **mode}

    def ask(word: dict[str, Any]) -> Any:
        return seer(
            images=[picture(1), picture(2)], text=text, batch_size=2, generate_kwargs={**call, **word}
        )

    stock, paged = both(seer.model, ask)
    assert stock == paged


def test_chat_about_a_picture(seer: Any) -> None:
    """Messages in, messages out."""
    talk = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": picture(3)},
                {"type": "text", "text": " Tell me about the fox."},
            ],
        }
    ]

    def ask(word: dict[str, Any]) -> Any:
        return seer(text=talk, max_new_tokens=12, generate_kwargs={"do_sample": False, **word})[0][
            "generated_text"
        ][-1]

    stock, paged = both(seer.model, ask)
    assert stock == paged
    assert paged["role"] == "assistant"
