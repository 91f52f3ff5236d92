"""Measured tables of the documents from benchmarks/results: `python benchmarks/performance_page.py`.

docs/performance.md has a table and a plot of h200_*.json, which `benchmarks/run_tables.py` measures; docs/deploy.md has
the table of cpu*_formats_*.json, which hold their commands. Each page has a begin and an end comment around its table.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/performance.md"
DEPLOY_PAGE = ROOT / "docs/deploy.md"
PLOT = ROOT / "docs/images/speedup.svg"
BEGIN, END = "<!-- begin: benchmarks/performance_page.py -->", "<!-- end -->"
COLUMNS = {
    "baseline": "baseline",
    "baseline_matmul": "baseline, matmul",
    "baseline, fp8": "baseline, fp8",
    "ward": "`ward`",
    "ward, fp8": "`ward`, fp8",
    "mctf": "`mctf`",
    "mctf_exact": "`mctf_exact`",
    "tome": "`tome`",
    "free_drop_conv": "free drop",
    "free_drop": "free drop, matmul",
}
ALIASES = {"plain": "baseline", "free_drop, own patch embedding": "free_drop_conv"}
NOISY = 0.05  # spreads above this are shown beside the number
EQUAL = 0.10  # by this share, a method's FLOPs may exceed the upper bound's: beyond it, times are of unequal work
TITLE = re.compile(
    r"(?P<model>\w+), (?P<amount>(r|flops)=[\w.]+( in blocks [\d,]+)?), batch (?P<batch>\d+), (?P<size>\d+)x\d+,"
)


def read_tables(folder: Path) -> list[dict[str, Any]]:
    """One table per file: its setting, and its contenders by name; the setting orders them."""
    tables = []
    for path in sorted(folder.glob("h200_*.json")):
        facts = json.loads(path.read_text())
        (table,) = facts["tables"]
        setting = TITLE.match(table["title"]).groupdict()
        tables.append(
            {
                **setting,
                "pass": "training" if facts["training"] else "inference",
                "graph": facts["compiled"] == "reduce-overhead",
                "rounds": facts["rounds"],
                "trimmed": "trimmed last block" in table["title"],
                "rows": {contender(row): row for row in table["rows"]},
            }
        )
    return sorted(
        tables, key=lambda each: (each["pass"], int(each["size"]), each["model"], each["amount"], -int(each["batch"]))
    )


def contender(row: dict[str, Any]) -> str:
    """Name of a row, with its precision where it is quantized."""
    name, precision = ALIASES.get(row["name"], row["name"]), row.get("precision")
    return f"{name}, {precision}" if precision else name


def label(table: dict[str, Any]) -> str:
    model = re.sub(r"_patch\d+_\d+$", "", table["model"])
    size = "" if table["size"] == "224" else f", {table['size']} px"
    return (
        f"{'training ' if table['pass'] == 'training' else ''}{model}{size}, {table['amount']}, batch {table['batch']}"
        f"{', trimmed last block' if table['trimmed'] else ''}{', graph' if table['graph'] else ''}"
    )


def cell(row: dict[str, Any] | None) -> str:
    """Milliseconds, then speed-ups over the baseline and over `baseline_matmul`, and the spread where it is large."""
    if row is None:
        return ""
    name = contender(row)
    keys = {"baseline": (), "baseline_matmul": ("speedup",)}.get(name, ("speedup", "speedup_over_matmul"))
    remarks = [f"{row[key]:.2f}x" for key in keys if row.get(key)]
    remarks += [f"spread {row['spread']:.0%}"] * (row["spread"] > NOISY)
    return f"{row['milliseconds']:.2f}" + (f" ({', '.join(remarks)})" if remarks else "")


def overhead(rows: dict[str, dict[str, Any]]) -> str:
    """Time of mctf_exact and ward over that of dropping tokens, at about equal FLOPs: matching and pooling."""
    bound, shown = rows.get("free_drop"), []
    for name in ("mctf_exact", "ward"):
        if bound is None or name not in rows or rows[name]["gflops"] > (1 + EQUAL) * bound["gflops"]:
            continue
        shown.append(f"{rows[name]['milliseconds'] / bound['milliseconds'] - 1:+.0%}{' ward' * (name == 'ward')}")
    return ", ".join(shown)


def make_table(tables: list[dict[str, Any]]) -> str:
    names = [name for name in COLUMNS if any(name in table["rows"] for table in tables)]
    lines = [f"| | {' | '.join(COLUMNS[name] for name in names)} | overhead |", "|---|" + "---:|" * (len(names) + 1)]
    for table in tables:
        cells = [cell(table["rows"].get(name)) for name in names]
        lines.append(f"| {label(table)} | {' | '.join(cells)} | {overhead(table['rows'])} |")
    return "\n".join(lines)


def make_sentence(tables: list[dict[str, Any]]) -> str:
    rounds = sorted({table["rounds"] for table in tables})
    span = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    return f"Medians of {span} rounds, in which the models take turns."


def make_page(text: str, tables: list[dict[str, Any]]) -> str:
    """docs/performance.md with its table replaced."""
    return _replaced(text, f"{make_sentence(tables)}\n\n{make_table(tables)}", PAGE)


def _replaced(text: str, table: str, page: Path) -> str:
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def read_formats(folder: Path) -> list[dict[str, Any]]:
    """The facts of each `mctf bench --format`."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("cpu*_formats_*.json"))]


def make_formats_table(runs: list[dict[str, Any]]) -> str:
    """One line per model, batch, fusion and precision, one column per format; conditions above, commands below."""
    every = [row for run in runs for table in run["tables"] for row in table["rows"]]
    formats = list(dict.fromkeys(row["format"] for row in every))
    (device,), (rounds,) = ({run[key] for run in runs} for key in ("device", "rounds"))
    spread = max(row["spread"] for row in every)
    lines = [
        "Milliseconds per batch, and speed-up over the unfused model in float32 in the same format:",
        f"{device}, medians of {rounds} rounds in which all take turns, spread up to {100 * spread:.0f} %.",
        "",
        f"| | {' | '.join(formats)} |",
        "|---|" + "---:|" * len(formats),
    ]
    notes = []
    for run in runs:
        for table in run["tables"]:
            model = table["title"].partition(",")[0].removesuffix("_patch16_224")
            settings: dict[str, dict[str, str]] = {}
            for row in table["rows"]:
                precision = "" if row["precision"] == "fp32" else f", {row['precision']}"
                fusion = row["name"].removesuffix(precision).removesuffix(f", {row['format']}")
                setting = f"{model}, batch {row['batch']}, {fusion}{precision}"
                faster = "" if setting.endswith(", unfused") else f" ({row['speedup']:.2f}x)"
                settings.setdefault(setting, {})[row["format"]] = f"{row['milliseconds']:.1f}{faster}"
            lines += [
                f"| {setting} | {' | '.join(cells.get(each, '-') for each in formats)} |"
                for setting, cells in settings.items()
            ]
            notes += [f"{model}: {note}." for note in table["notes"] if "is left out" in note]
    commands = [f"    {run['command']}" for run in runs]
    return "\n".join([*lines, "", *dict.fromkeys(notes), *([""] if notes else []), *commands])


def make_deploy_page(text: str, runs: list[dict[str, Any]]) -> str:
    """docs/deploy.md with its table replaced, where it was measured."""
    return _replaced(text, make_formats_table(runs), DEPLOY_PAGE) if runs else text


def draw_plot(tables: list[dict[str, Any]], path: Path) -> None:
    """Speed-up of every fused model over the baseline, beside the free-drop upper bound."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    marks = {"ward": "D", "ward, fp8": "*", "mctf_exact": "o", "mctf": "s", "tome": "^", "free_drop": "|"}
    with rc_context({"svg.hashsalt": "mctf", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 0.3 * len(tables) + 1), layout="constrained")
        axes = figure.subplots()
        for name, mark in marks.items():
            points = [(table["rows"][name]["speedup"], at) for at, table in enumerate(tables) if name in table["rows"]]
            text = "free drop, matmul (upper bound)" if name == "free_drop" else name
            style = {"color": "black", "markersize": 12} if name == "free_drop" else {"markersize": 6}
            axes.plot(*zip(*points, strict=True), mark, label=text, linestyle="none", **style)
        axes.axvline(1, color="gray", linewidth=0.8)
        axes.set(xlabel="times the baseline's speed", yticks=range(len(tables)), yticklabels=[label(t) for t in tables])
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        figure.legend(loc="outside lower center", ncols=len(marks), frameon=False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    measured = read_tables(ROOT / "benchmarks/results")
    PAGE.write_text(make_page(PAGE.read_text(), measured))
    draw_plot(measured, PLOT)
    DEPLOY_PAGE.write_text(make_deploy_page(DEPLOY_PAGE.read_text(), read_formats(ROOT / "benchmarks/results")))
