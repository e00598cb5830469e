"""How many rows were kept, dropped and repaired, printed once all are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

NUM_EXAMPLES = 3


@dataclass
class Counts:
    """How many rows were read, dropped and repaired, why, and the positions of the first few.

    Bad rows are normal in human data: they are counted and shown, and stop
    a run only when none is left.

    >>> counts = Counts(read=3)
    >>> counts.drop("the prompt is empty", "mine.jsonl:2")
    >>> counts.kept
    2
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def drop(self, reason: str, position: str) -> None:
        self.dropped[reason] += 1
        self._remember(reason, position)

    def note(self, remark: str, position: str) -> None:
        self.noted[remark] += 1
        self._remember(remark, position)

    def _remember(self, reason: str, position: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(position)

    def __str__(self) -> str:
        lines = [f"read {self.read:,} rows, kept {self.kept:,}"]
        for label, reasons in (("dropped", self.dropped), ("repaired", self.noted)):
            for reason, number in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
                more = ", ..." if number > len(self.examples[reason]) else ""
                where = ", ".join(self.examples[reason]) + more
                lines.append(f"  {label} {number:,}: {reason} ({where})")
        return "\n".join(lines)
