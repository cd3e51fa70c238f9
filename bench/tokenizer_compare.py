"""MB/s of tokenizing on one thread: Tessera against the `tokenizers` package, on the same text, in turns.

The tokenizers are trained on the text once and kept. They have the pre-tokenizers of DeepSeek-V3, Llama 3 and GPT-2.
Each side encodes the same documents. The package uses its faster batch call. The better of two passes counts. The ids
must be the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from array import array
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

DOCUMENT_BYTES = 4096
PASSES = 2
STYLES = ("deepseek_v3", "llama3", "gpt2")
PROMISED_RATIO = 2.0  # with a smaller ratio the comparison fails


def make_documents(corpus: Path, path: Path, megabytes: int) -> None:
    opened = gzip.open(corpus) if corpus.suffix in (".dz", ".gz") else corpus.open("rb")
    with opened as file:
        text = file.read(megabytes << 20).decode(errors="replace")
    with path.open("w") as out:
        document, size = [], 0
        for line in text.splitlines(keepends=True):
            document.append(line)
            size += len(line)
            if size >= DOCUMENT_BYTES:
                out.write(json.dumps({"text": "".join(document)}) + "\n")
                document, size = [], 0


def read_documents(path: Path) -> list[str]:
    with path.open() as file:
        return [json.loads(line)["text"] for line in file]


def train(style: str, documents: list[str], vocab_size: int, path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "reference"))
    from tokenizer_styles import pre_tokenizer

    tokenizer = Tokenizer(models.BPE(ignore_merges=style == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=[AddedToken("<|endoftext|>", special=True, normalized=False)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def peer(tokenizer_path: str, input_path: str, passes: int) -> dict:
    """Returns the package's time. Runs in a process of its own."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_path)
    tokenizer.encode_special_tokens = True
    documents = read_documents(Path(input_path))
    # The fast call gives no offsets; older versions lack it.
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    seconds = float("inf")
    for _ in range(passes):
        start = time.perf_counter()
        encodings = encode(documents, add_special_tokens=False)
        seconds = min(seconds, time.perf_counter() - start)
    crc = 0
    num_tokens = 0
    for encoding in encodings:
        ids = encoding.ids
        num_tokens += len(ids)
        crc = zlib.crc32(array("i", ids).tobytes(), crc)
    return {"bytes": sum(len(d.encode()) for d in documents), "seconds": seconds, "tokens": num_tokens, "crc32": crc}


def run(command: list[str]) -> dict:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed:\n{result.stderr}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", help="the program bench_tokenizer")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--corpus", type=Path, default=Path("data/corpus/gcide.dict.dz"))
    parser.add_argument("--work", type=Path, default=Path("build/tokenizers"), help="keeps the text and the tokenizers")
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--vocab-size", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", nargs=2, metavar=("TOKENIZER", "INPUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        print(json.dumps(peer(*args.peer, PASSES)))
        return

    args.work.mkdir(parents=True, exist_ok=True)
    text = args.work / f"text-{args.megabytes}.jsonl"
    if not text.exists():
        make_documents(args.corpus, text, args.megabytes)
    print(f"\ntokenizers of {args.vocab_size} tokens, {text.stat().st_size / 1e6:.0f} MB of JSON lines, one thread")
    print("\n| tokenizer | Tessera, MB/s | `tokenizers`, MB/s | ratio |\n| --- | --- | --- | --- |")
    slow = []
    for style in STYLES:
        tokenizer = args.work / f"{style}-{args.megabytes}-{args.vocab_size}" / "tokenizer.json"
        if not tokenizer.exists():
            train(style, read_documents(text), args.vocab_size, tokenizer)
        ours, theirs = [], []
        for _ in range(args.rounds):
            a = run([args.bench, str(tokenizer), str(text), str(PASSES)])
            b = run([args.python, __file__, "--peer", str(tokenizer), str(text)])
            for field in ("bytes", "tokens", "crc32"):
                if a[field] != b[field]:
                    sys.exit(f"{style}: {field} differ: {a[field]} and {b[field]}")
            ours.append(a["bytes"] / a["seconds"] / 1e6)
            theirs.append(b["bytes"] / b["seconds"] / 1e6)
        speed, other = statistics.median(ours), statistics.median(theirs)
        print(f"| {style} | {speed:.1f} | {other:.1f} | **{speed / other:.2f}** |", flush=True)
        if speed < PROMISED_RATIO * other:
            slow.append(style)
    if slow:
        sys.exit(f"less than {PROMISED_RATIO} times as fast: {', '.join(slow)}")


if __name__ == "__main__":
    main()
