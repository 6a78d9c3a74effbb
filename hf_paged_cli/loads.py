"""The loads that `hf-paged bench` measures."""

LOADS = {
    "equal": "every answer has the same length",
    "ragged": "answers of any length, four times the mean at most: each token is as likely to be the last",
    "samples": "four samples of each prompt",
    "beams": "a search with four beams for each prompt",
    "prefix": "the prompts share seven eighths of their tokens, and the shared part was there before",
}
