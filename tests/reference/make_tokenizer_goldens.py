"""Makes golden files of tokenizers: the results of the `tokenizers` package for 10,000 strings.

Trains three small byte-level BPE tokenizers, built like those of DeepSeek-V3, Llama 3 and GPT-2, and writes to
tests/golden/tokenizer/ (all numbers little-endian, all files gzip):

  strings.gz      per string: uint32 number of bytes, UTF-8
  STYLE.json.gz   the tokenizer
  STYLE.ids.gz    per string: uint32 number n, n uint16 ids of encode(text, add_special_tokens=False); then, in the same
                  form, the ids when special tokens are plain text (encode_special_tokens = True), or, if these are the
                  same, n = 0xFFFFFFFF and no ids
  STYLE.decode.gz per case: uint32 n, n uint16 ids, uint32 number of bytes, decode(ids, skip_special_tokens=True) in
                  UTF-8. The package writes U+FFFD for bytes that are not UTF-8.

Each library knows the characters of its own version of Unicode. Strings have only characters of Unicode 14, the version
of PCRE2 10.42 in Debian 12 and of Python 3.11. Therefore this script needs that Python.

The same versions of Python and `tokenizers` give the same files.
"""

from __future__ import annotations

import gzip
import inspect
import json
import random
import string
import struct
import sys
import unicodedata
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tokenizer_styles import pre_tokenizer

OUTPUT = Path(__file__).parent.parent / "golden" / "tokenizer"
NUM_STRINGS = 10_500
NUM_DECODED = 1_500
VOCAB_SIZE = 4000
SAME = b"\xff\xff\xff\xff"

DEEPSEEK_BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
DEEPSEEK_EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
DEEPSEEK_PAD = "<\uff5c\u2581pad\u2581\uff5c>"


def characters() -> list[str]:
    """Returns the characters that both libraries know: assigned in Unicode 14, no surrogates, no private use."""
    if unicodedata.unidata_version != "14.0.0":
        sys.exit(f"needs a Python with Unicode 14.0.0, this one has {unicodedata.unidata_version}")
    return [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]


ASSIGNED = characters()
KNOWN = set(ASSIGNED)


def by_script() -> dict[str, list[str]]:
    """Groups letters by the first word of their names, which is the script's: LATIN, CYRILLIC, HANGUL, ..."""
    scripts: dict[str, list[str]] = {}
    for c in ASSIGNED:
        if unicodedata.category(c)[0] in "LM":
            scripts.setdefault(unicodedata.name(c, "OTHER").split()[0], []).append(c)
    return {name: letters for name, letters in scripts.items() if len(letters) >= 20}


SCRIPTS = by_script()
DIGITS = [c for c in ASSIGNED if unicodedata.category(c)[0] == "N"]
MARKS = [c for c in ASSIGNED if unicodedata.category(c)[0] == "M"]
SYMBOLS = [c for c in ASSIGNED if unicodedata.category(c)[0] in "PS"]
SPACES = [c for c in ASSIGNED if c.isspace()] + ["\u180e", "\u200b", "\u200d", "\ufeff", "\x1c", "\x1f"]
EMOJI = [c for c in ASSIGNED if 0x1F300 <= ord(c) < 0x1FB00]
FLAGS = [chr(0x1F1E6 + i) for i in range(26)]


def source_text() -> str:
    """Returns English and code that any Python has: sources of its library that change little, and their
    documentation."""
    import argparse
    import ast
    import collections
    import decimal
    import difflib
    import email.message
    import heapq
    import os
    import statistics
    import textwrap

    modules = [argparse, ast, collections, difflib, email.message, heapq, os, statistics, textwrap]
    text = [inspect.getsource(module) for module in modules]
    text += [inspect.getdoc(module) or "" for module in (decimal, collections, random, json)]
    return "\n".join(text)


def training_texts(rng: random.Random, source: str) -> list[str]:
    """Returns the source, and invented words of many scripts, some of which occur often."""
    texts = [line for line in source.splitlines(keepends=True)]
    for name in sorted(SCRIPTS):
        letters = SCRIPTS[name][:200]
        words = ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(30)]
        for _ in range(15):
            texts.append(" ".join(rng.choices(words, k=8)) + rng.choice(["", ".", "\n", "\r\n"]))
    for _ in range(300):
        texts.append("".join(rng.choices(DIGITS[:60], k=rng.randint(1, 12))))
        texts.append(" " * rng.randint(1, 16) + "\n" * rng.randint(0, 3) + "\t" * rng.randint(0, 3))
    return texts


def train(name: str, texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    # DeepSeek-V3's and GPT-2's tokenizers have their special tokens in the model's vocabulary. Llama 3's has them
    # beside it.
    in_vocab = {"deepseek_v3": [DEEPSEEK_BOS, DEEPSEEK_EOS, DEEPSEEK_PAD], "llama3": [], "gpt2": ["<|endoftext|>"]}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in in_vocab[name]]))
    if name == "deepseek_v3":
        turns = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
        tokenizer.add_tokens([AddedToken(turn, normalized=False) for turn in turns])
        tokenizer.add_special_tokens(["<\uff5cplace\u2581holder\u2581no\u25810\uff5c>", "<|EOT|>"])
        template = (DEEPSEEK_BOS, None)
    elif name == "llama3":
        tokens = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"]
        tokenizer.add_special_tokens(tokens)
        # Llama's tokenizer has none of these, but every flag must occur somewhere.
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
        tokenizer.add_tokens([AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
                              AddedToken("<right>", rstrip=True), AddedToken("word", single_word=True),
                              AddedToken("<|eot_id|><|eot_id|>", normalized=False), AddedToken("ab ", normalized=True)])
        template = ("<|begin_of_text|>", None)
    else:
        template = (None, None)
    if template[0] is not None:
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=[template[0], "$A"],
                                          special_tokens=[(template[0], tokenizer.token_to_id(template[0]))])])
    return tokenizer


def random_strings(rng: random.Random, source: str, specials: list[str]) -> list[str]:
    scripts = sorted(SCRIPTS)
    contractions = ["'s", "'S", "'\u017f", "'t", "'RE", "'ve", "'Ve", "'m", "'ll", "'lL", "'d", "\u2019s", "''s", "'x"]

    def word() -> str:
        return "".join(rng.choices(SCRIPTS[rng.choice(scripts)], k=rng.randint(1, 9)))

    def latin() -> str:
        return "".join(rng.choices(string.ascii_letters, k=rng.randint(1, 9)))

    def source_part() -> str:
        at = rng.randrange(len(source) - 400)
        return source[at:at + rng.randint(1, 250)]

    def many(items: list[str], most: int) -> str:
        return "".join(rng.choices(items, k=rng.randint(1, most)))

    def emoji() -> str:
        variants = ["", "\ufe0f", "\U0001f3fd"]
        joined = "\u200d".join(rng.choice(EMOJI) + rng.choice(variants) for _ in range(rng.randint(1, 4)))
        return joined + many(FLAGS, 4) * rng.randint(0, 2)

    def marked() -> str:
        return "".join(rng.choice(string.ascii_letters + " ") + many(MARKS, 3) for _ in range(rng.randint(1, 6)))

    def bytes_() -> str:
        return bytes(rng.randrange(256) for _ in range(rng.randint(1, 40))).decode("utf-8", errors="replace")

    def japanese() -> str:
        codes = (*range(0x3040, 0x30FF), *range(0x4E00, 0x4E60), *range(0x9F90, 0x9FB0))
        return many([chr(c) for c in codes] + list("\u3001\u30021a "), 20)

    blank = [" ", " ", "  ", "\n", "\r", "\r\n", "\t", "\v", "\f", "\u00a0", "\u2028", "\u3000", "\x85", "    "]
    makers = [
        source_part, source_part, lambda: many(blank, 8), lambda: many(SPACES, 5), emoji, marked, bytes_, japanese,
        lambda: many(DIGITS, 9), lambda: str(rng.randrange(10**rng.randint(1, 14))), lambda: many(SYMBOLS, 6),
        lambda: many(list(string.punctuation), 6) + latin(), lambda: many(ASSIGNED, 12),
        lambda: latin() + rng.choice(contractions), lambda: " ".join(word() for _ in range(rng.randint(1, 5))),
        lambda: many(specials, 3), lambda: rng.choice(specials)[:-1],
        lambda: rng.choice(blank) + rng.choice(specials) + rng.choice(blank + [latin()]),
        lambda: many(list(string.printable), 30),
    ]
    strings = ["", " ", "\n", "'", "a", "\ufffd", "\u2581", "\x00", "Hello, world!", "a" * 5000, "ab" * 3000,
               " " * 3000, "\n" * 1000, " \n" * 1000, "1" * 2000, "=" * 2000, "\u4e2d" * 2000, "\u0301" * 500,
               "x" + " " * 500 + "y", "\U0001f1e9" * 301, "".join(SPACES) * 20]
    for _ in range(60):
        strings.append(rng.choice(string.ascii_lowercase) + "".join(rng.choices("etaoin", k=rng.randint(20, 700))))
    seen = set(strings)
    while len(strings) < NUM_STRINGS:
        text = "".join(rng.choice(makers)() for _ in range(rng.choice([1, 1, 1, 2, 3, 6])))
        if text not in seen and all(c in KNOWN for c in text):
            seen.add(text)
            strings.append(text)
    return strings


def pack(ids: list[int]) -> bytes:
    return struct.pack(f"<I{len(ids)}H", len(ids), *ids)


def write(name: str, content: bytes) -> None:
    (OUTPUT / name).write_bytes(gzip.compress(content, 9, mtime=0))


def main() -> None:
    rng = random.Random(20240917)
    source = source_text()
    texts = training_texts(rng, source)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    trained = {name: train(name, texts) for name in ("deepseek_v3", "llama3", "gpt2")}
    specials = sorted({token.content for t in trained.values() for token in t.get_added_tokens_decoder().values()})
    strings = random_strings(rng, source, specials + ["word", "sword", "words", "ab ", "word\u0301"])
    write("strings.gz", b"".join(struct.pack("<I", len(s.encode())) + s.encode() for s in strings))
    for name, tokenizer in trained.items():
        # The tokenizer is loaded from its text, whatever the format of that text.
        text = tokenizer.to_str(pretty=False)
        tokenizer = Tokenizer.from_str(text)
        write(f"{name}.json.gz", text.encode())
        tokenizer.encode_special_tokens = False
        with_special = [e.ids for e in tokenizer.encode_batch(strings, add_special_tokens=False)]
        tokenizer.encode_special_tokens = True
        plain = [e.ids for e in tokenizer.encode_batch(strings, add_special_tokens=False)]
        write(f"{name}.ids.gz", b"".join(pack(a) + (SAME if a == b else pack(b)) for a, b in zip(with_special, plain)))
        differ = sum(a != b for a, b in zip(with_special, plain))
        cases = []
        vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
        for _ in range(NUM_DECODED):
            ids = rng.choices(vocabulary, k=rng.randint(0, 12))
            if rng.random() < 0.5:  # many ids are halves of characters
                ids = [rng.choice(vocabulary[:300]) if rng.random() < 0.7 else i for i in ids]
            decoded = tokenizer.decode(ids, skip_special_tokens=True).encode()
            cases.append(pack(ids) + struct.pack("<I", len(decoded)) + decoded)
        write(f"{name}.decode.gz", b"".join(cases))
        print(f"{name}: {tokenizer.get_vocab_size()} tokens, {len(text)} bytes; {len(strings)} strings, "
              f"{sum(map(len, with_special))} ids, {differ} differ when special tokens are text")
    print(f"tokenizers {tokenizers.__version__}; {sum(f.stat().st_size for f in OUTPUT.iterdir())} bytes in {OUTPUT}")


if __name__ == "__main__":
    main()
