"""Results of evaluations, read from run folders: means with intervals, and their tables. No torch.

`marlhf evaluate` leaves scores (`Summary`), `marlhf best-of-n` samples to choose from (`Grid`) and
responses decided block by block (`BlockLines`), `marlhf pass-at-k` its summary (`PassRates`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from marlhf.errors import SettingError
from marlhf.intervals import NO_INTERVAL, Interval, bootstrap_mean, interval, mean
from marlhf.runs.atomic import Line
from marlhf.runs.evaluations import EvaluationFile, SamplingSettings, read_evaluations
from marlhf.runs.layout import BEST_OF_N, BLOCKS, EVALUATION, PASS_AT_K, read_object
from marlhf.runs.read import number

MEASURES = (
    ("KL", "kl"),
    ("Length", "length"),
    ("Repetition", "repetition"),
    ("Distinct-1", "distinct_1"),
    ("Distinct-2", "distinct_2"),
    ("Ended", "ended"),
)
CONVERSATION_MEASURES = (
    ("Success", "success"),
    ("Turns", "turns"),
    ("Tool calls", "tool_calls"),
    ("Tool errors", "tool_errors"),
    ("World tokens", "world_tokens"),
)
"""Of lines that are conversations."""
ALL = "all"
DIFFICULTIES = ("introductory", "interview", "competition")


@dataclass(frozen=True)
class Summary:
    """Means over prompts with 95% intervals: of each judge's scores, and of each measure."""

    prompts: int
    scores: dict[str, Interval]
    measures: dict[str, Interval]


def summarise(lines: Sequence[Line]) -> Summary:
    names = dict.fromkeys(name for line in lines for name in line["scores"])
    return Summary(
        len(lines),
        {name: interval(scores_of(lines, name)) for name in names},
        {
            key: interval([_number(line.get(key)) for line in lines])
            for _, key in MEASURES + CONVERSATION_MEASURES
        },
    )


def measures_of(summaries: Iterable[Summary]) -> list[tuple[str, str]]:
    """The measures to show: those of conversations where there are any."""
    known: dict[str, float] = {}
    for each in summaries:
        for key, value in each.measures.items():
            if value.size:
                known[key] = max(value.mean, known.get(key, 0.0))
    if not known.get("tool_calls"):  # an environment without tools
        known = {key: value for key, value in known.items() if not key.startswith("tool_")}
    return [*MEASURES, *(m for m in CONVERSATION_MEASURES if m[1] in known)]


def scores_of(lines: Sequence[Line], judge: str) -> list[float]:
    """A judge's score of each line, NaN where it gave none."""
    return [number(line["scores"].get(judge)) for line in lines]


def _number(value: object) -> float:
    return float(value) if isinstance(value, bool) else number(value)


def read_scored(folder: Path) -> list[EvaluationFile]:
    """What `marlhf evaluate` left in a run folder: files whose lines have scores by name."""
    return read_evaluations(folder / EVALUATION, lambda line: isinstance(line.get("scores"), dict))


def summary_table(summaries: Sequence[tuple[str, Summary]]) -> str:
    """What `marlhf evaluate` prints: one row per model."""
    judges = list(dict.fromkeys(name for _, each in summaries for name in each.scores))
    measures = measures_of(each for _, each in summaries)
    rows: list[list[str]] = []
    for name, each in summaries:
        cells = [each.scores.get(judge, NO_INTERVAL).text() for judge in judges]
        means = [each.measures[key].mean for _, key in measures]
        cells += ["-" if math.isnan(mean) else f"{mean:.3g}" for mean in means]
        rows.append([name, *cells, str(each.prompts)])
    return text_table(["", *judges, *(title.lower() for title, _ in measures), "prompts"], rows)


def data_tables(models: Sequence[tuple[str, Path]], like: SamplingSettings) -> list[str]:
    """One table per reward: a row per model, a column per data set, as in the paper's table 2.

    `models` are names and folders. Only files with the sampling of `like`, whatever their data, are
    in it. Gains over the first model are paired by prompt. None where there is one data set alone.
    """
    by_model = [(name, _lines_by_data(folder, like)) for name, folder in models]
    data = sorted({each for _, by_data in by_model for each in by_data})  # the run's own is ""
    if len(data) < 2:
        return []
    files = [lines for _, by_data in by_model for lines in by_data.values()]
    judges = dict.fromkeys(name for lines in files for line in lines for name in line["scores"])
    tables: list[str] = []
    for judge in judges:
        rows = [
            [name, *(_score(by_data, by_model[0][1], each, judge) for each in data)]
            for name, by_data in by_model
        ]
        header = [f"score by {judge}", *(each or "held out" for each in data)]
        tables.append(text_table(header, rows))
    return tables


def _lines_by_data(folder: Path, like: SamplingSettings) -> dict[str, list[Line]]:
    return {
        file.settings.data: file.lines
        for file in read_scored(folder)
        if file.settings is not None and replace(file.settings, data=like.data) == like
    }


def _score(
    model: dict[str, list[Line]], baseline: dict[str, list[Line]], data: str, judge: str
) -> str:
    """`0.84 [0.80, 0.88]` for the baseline, `1.41 +0.57 [+0.50, +0.64]` with a gain over it."""
    scores = _by_prompt(model.get(data, []), judge)
    score = interval([*scores.values()])
    if not score.size:
        return "-"
    if model is baseline or data not in baseline:
        return score.text(lambda x: f"{x:.2f}")
    before = _by_prompt(baseline[data], judge)
    gain = interval([scores[key] - before[key] for key in scores if key in before])
    return f"{score.mean:.2f} {gain.text(lambda x: f'{x:+.2f}')}"


def _by_prompt(lines: Sequence[Line], judge: str) -> dict[str, float]:
    return dict(zip((str(line["key"]) for line in lines), scores_of(lines, judge)))


def expected_best(scores: Sequence[float], n: int) -> float:
    """The mean best score of n samples, from all there are, without bias.

    Of N sorted scores the i-th (from 1) is the best of C(i-1, n-1) of the C(N, n) choices.

    >>> expected_best([1.0, 2.0, 4.0], n=2)  # best of 12, 14, 24: (2 + 4 + 4) / 3
    3.333333333333333
    """
    return expected_of_best(scores, scores, n)


def expected_of_best(values: Sequence[float], scores: Sequence[float], n: int) -> float:
    """The mean of another number, such as length, of the best-scored of n samples."""
    count = len(scores)
    if not 1 <= n <= count:
        raise SettingError(
            f"The best of {n} needs at least {n} samples per prompt; there are {count}."
        )
    order = sorted(range(count), key=lambda i: scores[i])
    shares = [math.comb(i, n - 1) / math.comb(count, n) for i in range(count)]
    return math.fsum(share * values[at] for share, at in zip(shares, order))


def kl_bound(n: int) -> float:
    """The most by which the best of n differs from one sample, in nats: log n - (n - 1) / n."""
    return math.log(n) - (n - 1) / n


@dataclass(frozen=True)
class Grid:
    """Samples of each temperature, one line per prompt, and the n's to look at."""

    ns: list[int]
    lines: dict[float, list[Line]]

    def cell(self, temperature: float, n: int) -> Interval:
        """The mean best score over prompts, with its interval."""
        return interval([expected_best(line["scores"], n) for line in self.lines[temperature]])

    def length(self, temperature: float, n: int) -> float:
        lines = self.lines[temperature]
        return mean([expected_of_best(x["lengths"], x["scores"], n) for x in lines])


def grid_table(grid: Grid) -> str:
    """What `marlhf best-of-n` prints: one row per temperature, one column per n."""
    rows = [[f"{t:g}", *(grid.cell(t, n).text() for n in grid.ns)] for t in grid.lines]
    return text_table(["temperature", *(f"best of {n}" for n in grid.ns)], rows)


def read_grids(folder: Path) -> dict[str, Grid]:
    """What `marlhf best-of-n` left in a run folder, by all settings but the temperature."""
    by_label: dict[str, dict[float, list[Line]]] = {}
    for file in read_evaluations(folder / BEST_OF_N, _has_samples):
        if file.settings is not None:
            by_temperature = by_label.setdefault(file.settings.label_without_temperature, {})
            by_temperature[file.settings.temperature] = file.lines
    grids: dict[str, Grid] = {}
    for name, lines in by_label.items():
        most = min(len(line["scores"]) for each in lines.values() for line in each)
        ns = sorted({*(2**i for i in range(most.bit_length())), most})
        grids[name] = Grid(ns, dict(sorted(lines.items())))
    return grids


def _has_samples(line: Line) -> bool:
    """Whether a line has scores and lengths: one edited by hand may not."""
    scores, lengths = line.get("scores"), line.get("lengths")
    if not isinstance(scores, list) or not isinstance(lengths, list):
        return False
    return 0 < len(scores) == len(lengths) and _all_finite(*scores, *lengths)


def _all_finite(*values: object) -> bool:
    return all(math.isfinite(number(value)) for value in values)


class FrontierPoint(NamedTuple):
    """One way of choosing, and what it gains and costs per response."""

    label: str
    candidates: int  # k or n
    score: Interval
    kl_bound: float  # nats
    tokens: float  # sampled, those that were not kept included
    length: float


@dataclass(frozen=True)
class BlockLines:
    """The responses of one k, one line per prompt."""

    blocks: str
    value: str
    k: int
    settings: SamplingSettings
    lines: list[Line]

    def point(self) -> FrontierPoint:
        decisions = mean([line["num_blocks"] for line in self.lines])
        return FrontierPoint(
            f"{self.blocks}, {self.value}, k = {self.k}",
            self.k,
            interval([line["score"] for line in self.lines]),
            decisions * kl_bound(self.k),
            mean([line["num_sampled"] for line in self.lines]),
            mean([line["length"] for line in self.lines]),
        )


def whole_points(grid: Grid, temperature: float) -> list[FrontierPoint]:
    """The same for whole responses: the best of n."""
    length = mean([mean(line["lengths"]) for line in grid.lines[temperature]])
    return [
        FrontierPoint(
            f"best of {n}",
            n,
            grid.cell(temperature, n),
            kl_bound(n),
            n * length,
            grid.length(temperature, n),
        )
        for n in grid.ns
    ]


def frontier_table(points: Sequence[FrontierPoint]) -> str:
    """What `marlhf best-of-n --blocks` prints."""
    rows = [
        [p.label, p.score.text(), f"{p.kl_bound:.2f}", f"{p.tokens:.0f}", f"{p.length:.1f}"]
        for p in points
    ]
    return text_table(["chosen", "score", "KL bound", "tokens sampled", "length"], rows)


def read_frontiers(folder: Path) -> dict[str, dict[str, list[FrontierPoint]]]:
    """What a run folder has, by setting and by way of choosing, each in the order of k or n."""
    frontiers: dict[str, dict[str, list[FrontierPoint]]] = {}
    grids = read_grids(folder)
    for file in read_evaluations(folder / BLOCKS, _is_decided):
        if (settings := file.settings) is None:
            continue
        first = file.lines[0]
        of_setting = frontiers.setdefault(settings.label, {})
        grid = grids.get(settings.label_without_temperature)
        if grid is not None and settings.temperature in grid.lines:
            of_setting.setdefault("whole responses", whole_points(grid, settings.temperature))
        name = f"{first['blocks']}, {first['value']}"
        each = BlockLines(
            str(first["blocks"]), str(first["value"]), first["k"], settings, file.lines
        )
        of_setting.setdefault(name, []).append(each.point())
    for of_setting in frontiers.values():
        for points in of_setting.values():
            points.sort(key=lambda point: point.candidates)
    return frontiers


def _is_decided(line: Line) -> bool:
    """Whether a line has all that a point needs: one edited by hand may not."""
    if not isinstance(k := line.get("k"), int) or k < 1 or not {"blocks", "value"} <= line.keys():
        return False
    return _all_finite(*map(line.get, ("score", "length", "num_blocks", "num_sampled")))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of k samples is right, without bias: 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(samples=4, correct=1, k=2)
    0.5
    """
    if not 1 <= k <= samples:
        raise SettingError(f"pass@{k} needs at least {k} samples per problem; there are {samples}.")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def summarise_passes(
    problems: Sequence[Mapping[str, Any]], ks: Sequence[int]
) -> list[dict[str, Any]]:
    """One row per difficulty, and one for all: problems, pass@k with intervals, how samples ended.

    Each problem has `difficulty` and `results`, one word per sample.
    """
    present = {problem["difficulty"] for problem in problems} - {""}
    known = [name for name in DIFFICULTIES if name in present]
    groups = [*known, *sorted(present - set(known)), ALL]
    rows = []
    for name in groups if len(groups) > 2 else [ALL]:
        chosen = [p["results"] for p in problems if name in (ALL, p["difficulty"])]
        row: dict[str, Any] = {"difficulty": name, "problems": len(chosen)}
        for k in ks:
            values = [pass_at_k(len(r), r.count("passed"), k) for r in chosen]
            row[f"pass@{k}"] = list(bootstrap_mean(values)[:3])
        ends = [result for results in chosen for result in results]
        row["results"] = {end: ends.count(end) / len(ends) for end in sorted(set(ends))}
        rows.append(row)
    return rows


@dataclass(frozen=True)
class PassRate:
    """The problems of one difficulty, or all of them."""

    difficulty: str
    problems: int
    pass_at: dict[int, Interval]
    """By k."""
    results: dict[str, float]
    """How the samples ended, as shares."""


@dataclass(frozen=True)
class PassRates:
    """What `marlhf pass-at-k` measured of a run."""

    samples: int
    """Per problem."""
    rows: list[PassRate]


def read_summary(folder: Path) -> PassRates | None:
    """What was measured in a run folder; None where it was not, or the file is damaged."""
    try:
        summary = read_object(folder / PASS_AT_K)
        rows = [read_row(row) for row in summary["rows"]]
        return PassRates(int(summary["samples"]), rows) if rows else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_row(row: Mapping[str, Any]) -> PassRate:
    problems = int(row["problems"])
    pass_at: dict[int, Interval] = {}
    for key, value in row.items():
        if key.startswith("pass@"):
            mean, low, high = map(float, value)
            pass_at[int(key.removeprefix("pass@"))] = Interval(mean, low, high, problems)
    results = {str(end): float(share) for end, share in row["results"].items()}
    return PassRate(str(row["difficulty"]), problems, pass_at, results)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """The first `words` columns on the left, numbers on the right.

    >>> print(text_table(["run", "score"], [["ppo", "0.92"], ["macro-ppo", "1.5"]]))
    run        score
    ppo         0.92
    macro-ppo    1.5
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )
