"""The report of ``rota inspect`` in a terminal: verdict, what it is, modules, keys, norms.

Owns nothing; reads the plain values `inspect_adapter.inspect` gives.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

BAR_CELLS = 40
SHOWN_KEYS = 6


def show(report: dict[str, Any], title: str, console: Console, *, plot: bool = False) -> None:
    """Print the report for people; JSON has it exactly."""
    if report["accepted"]:
        against = report["model"] or "any base its shapes fit"
        verdict = Text.assemble(("accepted ", "bold green"), title, f"  ({against})")
        console.print(verdict, soft_wrap=True)
    else:
        word = "refused " if report["code"].startswith("REJECT") else "unreadable "
        verdict = Text.assemble((word, "bold red"), title, "\n  ", (report["code"], "bold"))
        verdict.append(f" {report['message']}")
        many = report.get("keys", {}).get("refused", 0) > 1  # listed below, each with its code
        for name in ("subject", "expected", "found"):
            if report.get(name) is not None and not (many and name == "found"):
                verdict.append(f"\n  {name}: {report[name]}")
        console.print(verdict, soft_wrap=True)
    if "what" in report:
        console.print(_facts(report))
    if report.get("modules"):
        console.print(_modules(report["modules"]))
    if report.get("keys", {}).get("refused"):
        console.print(_refused(report["keys"]), soft_wrap=True)
    for field, why in report.get("ignored", ()):
        console.print(Text(f"ignored  {field}: {why}"), soft_wrap=True)
    for note in report.get("notes", ()):
        console.print(Text(f"note     {note}"), soft_wrap=True)
    if report.get("delta_norm_per_layer"):
        norms = report["delta_norm_per_layer"]
        if plot:
            console.print(_plot(norms))
        else:
            console.print(Text(f"delta norm by layer  {spark(list(norms.values()))}"))


def _facts(report: dict[str, Any]) -> Table:
    what = report["what"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    files = "1 file" if what["files"] == 1 else f"{what['files']} files"
    table.add_row("kind", f"{what['kind']}, as {what['format']} writes it")
    table.add_row("config", f"r {what['r']}, alpha {what['lora_alpha']:g}")
    dtypes = " ".join(what["dtypes"])
    size = f"{what['tensors']} tensors {dtypes} in {files}, {size_of(what['file_bytes'])}"
    table.add_row("file", size)
    matched = report.get("keys", {}).get("matched")
    if matched and not report["accepted"]:
        table.add_row("matched", ", ".join(f"{name} {n}" for name, n in matched.items()))
    if report["accepted"]:
        if report["vectors"]:
            parts = [f"{kind} on {count} modules" for kind, count in report["vectors"].items()]
            table.add_row("vectors", ", ".join(parts))
        if report["embed_rows"] or report["head_rows"]:
            rows = f"embedding {report['embed_rows']}, head {report['head_rows']}"
            table.add_row("token rows", rows if report["model"] else f"at most: {rows}")
        slot = size_of(report["slot_bytes"])
        table.add_row("slot bytes", slot if report["model"] else f"{slot} for these modules")
        if report["annex_bytes"]:
            table.add_row("arena bytes", f"{size_of(report['annex_bytes'])} beside its slot")
        needs = (f"{name}={value}" for name, value in report["needs"].items())
        table.add_row("engine", " ".join(needs))
        table.add_row("digest", report["digest"])
    return table


def _modules(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("module")
    for name in ("layers", "rank", "scale", "delta norm"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["module"],
            str(row["pairs"]),
            _span(row["ranks"]),
            _span(row["scales"]),
            f"{row['norm']:.4g}",
        )
    return table


def _span(values: tuple[float, ...]) -> str:
    """One value, a few, or a range of them."""
    if len(values) <= 3:
        return " ".join(f"{value:g}" for value in values)
    return f"{values[0]:g} .. {values[-1]:g}"


def _refused(keys: dict[str, Any]) -> Text:
    """The refused tensors by code, a few of each."""
    text = Text(f"refused tensors: {keys['refused']}", style="dim")
    by_code: dict[tuple[str, str], list[str]] = {}
    for entry in keys["refused_keys"]:
        by_code.setdefault((entry["code"], entry["why"]), []).append(entry["key"])
    for (code, why), found in by_code.items():
        text.append(f"\n  {code}", style="not dim bold")
        text.append(f"  {why}", style="not dim")
        for key in found[:SHOWN_KEYS]:
            text.append(f"\n    {key}", style="not dim")
        if len(found) > SHOWN_KEYS:
            text.append(f"\n    and {len(found) - SHOWN_KEYS} more", style="not dim")
    return text


def _plot(norms: dict[int, float]) -> Table:
    top = max(norms.values()) or 1.0
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("layer", justify="right")
    table.add_column("delta norm", justify="right")
    table.add_column("")
    for layer, norm in norms.items():
        table.add_row(str(layer), f"{norm:.4g}", Text(bar(norm / top, BAR_CELLS), style="cyan"))
    return table


def bar(part: float, cells: int) -> str:
    """A bar of ``part`` (0..1) of ``cells``, to an eighth of a cell."""
    eighths = round(part * cells * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def spark(values: list[float]) -> str:
    """Layers from first to last as one line of bars, with the range."""
    bars = " ▁▂▃▄▅▆▇█"
    top = max(values, default=0.0) or 1.0
    line = "".join(bars[round(v / top * 8)] for v in values)
    return f"{line}  0 .. {top:.4g}"


def size_of(count: int) -> str:
    """Bytes for people, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
