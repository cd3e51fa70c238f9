"""The pre-tokenizers of DeepSeek-V3, Llama 3 and GPT-2, as in their tokenizer.json files."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

DEEPSEEK_NUMBERS = r"\p{N}{1,3}"
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def pre_tokenizer(style: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style == "gpt2")
    patterns = {"deepseek_v3": [DEEPSEEK_NUMBERS, DEEPSEEK_CJK, DEEPSEEK_WORDS], "llama3": [LLAMA3_WORDS], "gpt2": []}
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns[style]]
    return pre_tokenizers.Sequence([*splits, byte_level]) if splits else byte_level
