"""What constituents cost a step, and how well the built-in English parser finds them.

    python bench/parsing.py                                    # 256 responses of 64 tokens
    python bench/parsing.py --step                             # within a PPO step, GPU or CPU
    python bench/parsing.py --agree spacy:en_core_web_sm --data HH_FOLDER

The first two parse this repository's own prose, which needs no data. `--agree` compares where macro
actions begin, at a cutoff of 5 and with words as tokens, with those of another parser, on sentences
of Anthropic's HH (a folder of data.jsonl.gz files). Word lists and rules were made on other
responses than those it takes: the first sentences (`--skip`) were looked at in the making.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import re
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlhf.core import Constituents, NGram, Responses, pack_spans, segment
from marlhf.spans.align import TokenBytes
from marlhf.spans.parser import build_parser
from marlhf.spans.phrases import Parser, Phrase
from marlhf.spans.workers import ParserPool, parse_flat

ROWS, TOKENS, CUTOFF = 256, 64, 5
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--step", action="store_true", help="time PPO steps with and without")
    options.add_argument("--shape", help="of bench/ppo_step.py; smollm2 on a GPU, else tiny")
    options.add_argument("--repeats", type=int, default=12)
    options.add_argument("--agree", metavar="PARSER", help="compare with this parser's boundaries")
    options.add_argument("--data", type=Path, help="folder of HH's data.jsonl.gz files")
    options.add_argument("--skip", type=int, default=3200, help="sentences left out")
    options.add_argument("--sentences", type=int, default=1500)
    options.add_argument("--parser", default="english", help="which to time")
    args = options.parse_args()
    if args.agree:
        print_agreement(args.agree, args.data, args.skip, args.sentences)
    elif args.step:
        print_steps(args.shape, args.repeats)
    else:
        print_costs(args.parser, args.repeats)


def prose() -> tuple[TokenBytes, list[list[int]]]:
    """Responses of English words, a token about three quarters of a word as in most models."""
    pages = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    text = " ".join(re.sub(r"```.*?```|\|.*", "", p.read_text("utf-8"), flags=re.S) for p in pages)
    pieces = re.findall(r"\s*\S{1,6}", text)
    ids = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokens = [ids[piece] for piece in pieces]
    starts = [random.Random(i).randrange(len(tokens) - TOKENS) for i in range(ROWS)]
    return TokenBytes([p.encode() for p in ids]), [tokens[s : s + TOKENS] for s in starts]


def print_costs(name: str, repeats: int) -> None:
    """Milliseconds of each part of a step's parsing."""
    table, responses = prose()
    aligned = table.align(responses)
    parser, pool = build_parser(name), ParserPool(name)
    flat = parse_flat(parser, aligned.texts)
    words = sum(len(text.split()) for text in aligned.texts)
    print(f"{platform.machine()}, {ROWS} x {TOKENS} tokens, {words} words, parser {name}\n")
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    spans = torch.from_numpy(aligned.token_spans(flat))
    view = Responses(torch.zeros(ROWS, TOKENS, dtype=torch.int64), mask, spans=spans)
    parts: dict[str, Callable[[], Any]] = {
        "align": lambda: table.align(responses),
        "parse, this process": lambda: parse_flat(parser, aligned.texts),
        f"parse, {pool.count} worker(s)": lambda: pool.submit(aligned.texts)(),
        "spans of tokens": lambda: aligned.token_spans(flat),
        "macro actions": lambda: segment(Constituents(), view),
    }
    for part, work in parts.items():
        work()
        seconds = [timed(work) for _ in range(repeats)]
        best, median = min(seconds), statistics.median(seconds)
        print(f"{part:24}{1e3 * best:9.2f} ms best{1e3 * median:9.2f} ms median")
    pool.close()


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def print_steps(shape_name: str | None, repeats: int) -> None:
    """A PPO step with n-grams beside one with constituents, taking turns."""
    import ppo_step  # beside this file

    from marlhf.spans.apply import Parsing

    class Prose(Parsing):
        """Random models write no English: text of the same size is parsed in its place."""

        def __init__(self) -> None:
            self.tokens, self.responses = prose()
            self.pool = ParserPool("english")

        def begin(self, responses: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
            return super().begin(self.responses)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = ppo_step.SHAPES[shape_name or ("smollm2" if device.type == "cuda" else "tiny")]
    shape = replace(shape, rows=ROWS, response=TOKENS)
    settings = argparse.Namespace(checkpointing=False, eager=False)
    torch.manual_seed(0)
    models, config = ppo_step.build(shape, device, settings)
    rules = {
        "ngram 5": (models, NGram(5)),
        "constituents": (replace(models, parsing=Prose()), Constituents()),
    }
    times: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(repeats):
        for name, (asked, rule) in rules.items():
            bench = ppo_step.Bench(asked, config, shape)
            _, by_rule = ppo_step.measure(bench, {name: rule}, 1)
            times[name] += by_rule[name]
    base = times["ngram 5"]
    for name, seconds in times.items():
        over = statistics.median(a / b for a, b in zip(seconds, base)) - 1
        median = statistics.median(seconds)
        print(f"{name:14}{min(seconds):9.4f} s best{median:9.4f} s median{100 * over:8.2f}%")


def print_agreement(name: str, folder: Path, skip: int, count: int) -> None:
    """Precision, recall and F1 of boundaries against the other parser's."""
    reference, english = build_parser(name), build_parser("english")
    sentences = take_sentences(reference, folder, skip, count)
    texts = [text for text, _ in sentences]
    theirs = [phrases for _, phrases in sentences]
    begins = [[p.begin for p in phrases if not p.label] for phrases in theirs]
    wanted = boundaries(theirs, begins)
    start = time.process_time()
    ours = english(texts)
    rate = len(texts) / (time.process_time() - start)
    words = sum(map(len, begins))
    print(f"{len(texts)} sentences, {words} words, reference {name}, cutoff {CUTOFF}\n")
    print(f"{'parser':16}{'precision':>10}{'recall':>8}{'F1':>7}{'sentences/s':>13}")
    grams = [set(range(CUTOFF, len(b), CUTOFF)) for b in begins]
    rows = {
        "english": (boundaries(ours, begins), f"{rate:.0f}"),
        "fixed 5-grams": (grams, ""),
    }
    for row, (found, speed) in rows.items():
        both = sum(len(a & b) for a, b in zip(found, wanted))
        ours_, theirs_ = sum(map(len, found)), sum(map(len, wanted))
        precision, recall = both / ours_, both / theirs_
        f1 = 2 * both / (ours_ + theirs_)
        print(f"{row:16}{precision:10.3f}{recall:8.3f}{f1:7.3f}{speed:>13}")


def take_sentences(
    parser: Parser, folder: Path, skip: int, count: int
) -> list[tuple[str, list[Phrase]]]:
    """Sentences of answers, as the reference divides and parses them, in a fixed order."""
    texts: list[str] = []
    for file in sorted(folder.glob("**/data.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            dialogues = [json.loads(line)["chosen"] for line in lines]
        answers = (text.split("\n\nAssistant:")[-1].strip() for text in dialogues)
        texts += filter(None, answers)
    random.Random(0).shuffle(texts)
    found: list[tuple[str, list[Phrase]]] = []
    for first in range(0, len(texts), 100):
        batch = texts[first : first + 100]
        for text, phrases in zip(batch, parser(batch)):
            roots = [p for i, p in enumerate(phrases) if i == 0 or p.begin >= reach(phrases[:i])]
            for root in roots:
                inside = [p for p in phrases if root.begin <= p.begin and p.end <= root.end]
                moved = [Phrase(a - root.begin, b - root.begin, x) for a, b, x in inside]
                if sum(not p.label for p in moved) > 1:
                    found.append((text[root.begin : root.end], moved))
        if len(found) >= skip + count:
            break
    return found[skip : skip + count]


def reach(phrases: Sequence[Phrase]) -> int:
    return max(p.end for p in phrases)


def boundaries(
    trees: Sequence[Sequence[Phrase]], begins: Sequence[Sequence[int]]
) -> list[set[int]]:
    """The words that begin a macro action, but for the first of each sentence."""
    width = max(map(len, begins))
    spans = [
        [(bisect_left(b, p.begin), bisect_left(b, p.end)) for p in phrases]
        for phrases, b in zip(trees, begins)
    ]
    mask = torch.tensor([[i < len(b) for i in range(width)] for b in begins])
    view = Responses(torch.zeros_like(mask).long(), mask, spans=pack_spans(spans))
    starts = segment(Constituents(CUTOFF), view).starts
    return [set(row.nonzero().flatten().tolist()) - {0} for row in starts]


if __name__ == "__main__":
    main()
