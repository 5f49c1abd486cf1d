"""The tables of `docs/validate.md`, made of the code: ``python -m dsacp_npu.validation.page docs/validate.md``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dsacp_npu.validation import attended
from dsacp_npu.validation.kinds import KINDS
from dsacp_npu.validation.report import checks_in_order
from dsacp_npu.validation.schema import REFUSED, SECOND, SETTINGS, TENSORS, Setting, Spelling, Tensor

__all__ = ["TABLES", "with_tables"]

LAYOUT_KINDS = ("not_split", "graph_padding_ignored", "other_split", "wrong_rank", "wrong_cp_size")
BATCH_KINDS: tuple[str, ...] = ("leading_zero_missing", "lengths_not_cumulative", "offsets_for_lengths", "prefix_lost")
BATCH_KINDS += ("local_query_offsets", "local_key_lengths")


def rows_of(*rows: tuple[str, ...]) -> str:
    """A table in Markdown, the first row its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def spelled(entry: Setting | Tensor) -> str:
    """The other words for a name, by engine."""
    return "; ".join(f"`{spelling.word}` ({spelling.engines})" for spelling in entry.spellings)


def tensors() -> str:
    """Every tensor."""
    rows = [("name", "dtype and shape", "of", "meaning", "also written as")]
    for tensor in TENSORS:
        kind = f"{tensor.kind}[{', '.join(tensor.axes)}]"
        rows.append((f"`{tensor.name}`", kind, tensor.scope, tensor.meaning, spelled(tensor)))
    return rows_of(*rows)


def settings() -> str:
    """Every setting."""
    rows = [("name", "type", "meaning", "also written as")]
    rows += [(f"`{each.name}`", each.kind.__name__, each.meaning, spelled(each)) for each in SETTINGS]
    return rows_of(*rows)


def rules() -> str:
    """What is turned into ours."""
    ruled: list[tuple[str, Spelling]] = [
        (entry.name, spelling) for entry in (*SETTINGS, *TENSORS) for spelling in entry.spellings if spelling.rule
    ]
    seconds = {first: second for second, first in SECOND.items()}
    rows = [("word", "becomes", "by the rule")]
    for name, spelling in ruled:
        word = f"`{spelling.word}`" + (f", `{seconds[spelling.word]}`" if spelling.word in seconds else "")
        rows.append((word, f"`{name}`", spelling.rule))
    return rows_of(*rows)


def refused() -> str:
    """What is not accepted."""
    return rows_of(("word", "why, and what to write"), *((f"`{word}`", why) for word, why in REFUSED.items()))


def checks() -> str:
    """Every check in order."""
    rows = [("check", "compares", "what is right", "needs besides the lengths")]
    for check in checks_in_order():
        needs = ", ".join(f"`{name}`" for name in check.needs)
        rows.append((f"`{check.name}`", f"`{check.tensor}`", check.title, needs))
    return rows_of(*rows)


def kinds_of_checks() -> dict[str, list[str]]:
    """The checks that can name each kind."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for check in checks_in_order():
        kinds = [fault.kind for fault in check.faults]
        if check.name == "batch":
            kinds += BATCH_KINDS
        if check.name == "attention":
            kinds += [fault.kind for fault in attended.LSE_FAULTS]
        if check.local:
            kinds += LAYOUT_KINDS
        for kind in dict.fromkeys(kinds):
            found[kind].append(check.name)
    return found


def causes() -> str:
    """Every cause."""
    rows = [("kind", "what is the matter", "what helps", "reported as", "named by")]
    for kind, checks in kinds_of_checks().items():
        each = KINDS[kind]
        rows.append((f"`{kind}`", each.sentence, each.fix, each.source, ", ".join(checks)))
    return rows_of(*rows)


TABLES = {
    "settings": settings,
    "tensors": tensors,
    "rules": rules,
    "refused": refused,
    "checks": checks,
    "causes": causes,
}


def with_tables(text: str) -> str:
    """The page with each table between its two marks as the code has it now.

    Args:
        text: Markdown with ``<!-- table: NAME -->`` and ``<!-- end -->`` around each table of `TABLES`.

    Returns:
        str.
    """
    for name, made in TABLES.items():
        table = made()
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = pattern.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)
    return text


def main() -> None:
    """Rewrite the tables of a page."""
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
