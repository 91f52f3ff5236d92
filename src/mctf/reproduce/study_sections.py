"""What the sections of all studies share: measured columns, charts over cost, and the words around them."""

from collections.abc import Callable, Iterator, Sequence

from .._utils import plural
from ..evaluation.significance import Difference
from . import paper
from .document import Chart, Column, Finding, Origin, Part, Section, Series, Table, number
from .labels import ATTENTION, BACKBONES, GROUPS, LABELS, METHODS, criteria_words
from .runner import Experiment, Result
from .studies import ALL, DEFAULTS, R
from .verdicts import Row, judge, kl_lead, leads_at_equal_cost, rival_words, weakest

Groups = dict[str, list[Row]]

MEASURED = (
    Column("KL", Origin.MEASURED),
    Column("agreement %", Origin.MEASURED),
    Column("top-1 %", Origin.MEASURED),
    Column("GFLOPs", Origin.COUNTED),
)
PUBLISHED_TOP1 = Column("top-1 %", Origin.PAPER)
FINE_TUNED = "The paper's accuracy is of a fine-tuned DeiT-S on all of ImageNet's validation images."
_MANY = 5000  # images from which on one of them does not show in a percentage


def measured_cells(row: Row) -> tuple[str, ...]:
    """The cells of the columns MEASURED."""
    shares = number(row["agreement"], ".1f"), number(row["top1"], ".1f")
    return number(row["kl"], ".4f"), *shares, number(row["gflops"])


def published_top1(study: str, setting: str) -> str:
    """The cell of the column PUBLISHED_TOP1."""
    published = paper.ablation(study, setting)
    return number(None if published is None else published.top1, ".1f")


def side_by_side(caption: str, groups: Groups, words: Callable[[str], str]) -> Table:
    """A row an r, and for every measured number a column a group, so that groups are read against each other."""
    cells = {group: [measured_cells(row) for row in rows] for group, rows in groups.items()}
    columns = [Column(words(group), column.origin, over=column.title) for column in MEASURED for group in groups]
    labels = [row["label"] for row in next(iter(groups.values()))]
    rows = tuple(
        (label, *(cells[group][number_][place] for place in range(len(MEASURED)) for group in groups))
        for number_, label in enumerate(labels)
    )
    return Table(caption, (Column("r"), *columns), rows)


def study_section(
    experiment: Experiment,
    result: Result,
    *,
    findings: Sequence[Finding],
    parts: Sequence[Part],
    notes: Sequence[str] = (),
) -> Section:
    """A section with what is to be said of the plain model and of the number of images."""
    base, images = result["base"], result["images"]
    words = f"On {plural(images, 'image')}, no weight trained. The plain model costs {base['gflops']:.2f} GFLOPs"
    words += "." if base["top1"] is None else f" and has a top-1 of {base['top1']:.1f} %."
    if base["top1"] is not None and images < _MANY:
        words += f" One image is {100 / images:.1f} points of top-1."
    return Section(
        experiment.name,
        experiment.title,
        ", ".join(experiment.sources),
        experiment.measures,
        tuple(findings),
        tuple(parts),
        (words, *notes, *_missing(result)),
    )


def _missing(result: Result) -> Iterator[str]:
    """What the numbers lack."""
    if not knows_kl(result):
        yield "The model has no classifier: agreement, KL and accuracy are unknown."
    for case in result["capped"]:
        blocks = ", ".join(str(block) for block in case["blocks"])
        method = METHODS[case["method"]]
        yield f"{method} at r = {case['r']} has too few tokens left to fuse as many in block {blocks} (plural from 1)."


def grouped(result: Result) -> Groups:
    """Rows by group, in order."""
    groups: Groups = {}
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(row)
    return groups


def knows_kl(result: Result) -> bool:
    """Whether the model has a classifier, so that answers can be compared."""
    return result["base"]["kl"] is not None


def curves(groups: Groups, words: Callable[[str], str], *, what: str) -> list[Part]:
    """KL and top-1 against GFLOPs, one line a group; only what is known. what: the groups, in one word."""
    charts: list[Part] = []
    for field, y, title in (("kl", "KL to the plain model", "KL"), ("top1", "top-1 %", "Accuracy")):
        series = [
            Series(words(group), tuple(sorted((row["gflops"], row[field]) for row in rows)))
            for group, rows in groups.items()
            if len(rows) > 1 and all(row[field] is not None for row in rows)
        ]
        if series:
            better = "lower is nearer to the plain model" if field == "kl" else "higher is better"
            summary = f"One line for each {what}; fewer GFLOPs mean a larger r; {better}."
            charts.append(
                Chart(f"{title} against cost by {what}", summary, Origin.MEASURED, "GFLOPs", y, tuple(series))
            )
    return charts


# MERGED from mctf.reproduce.study_sections:
# Sections about settings and what they do to answers: off the shelf, and the ablations.

_OWN = ("bidirectional", "weighted_average", "approximated", "on")  # what the paper's method does


def off_the_shelf_section(experiment: Experiment, result: Result) -> Section:
    groups = grouped(result)
    table = side_by_side("MCTF and ToMe, measured here", groups, METHODS.__getitem__)
    parts = [table, *curves(groups, METHODS.__getitem__, what="method"), _published_off_the_shelf()]
    findings = _against_tome(groups) if knows_kl(result) else []
    notes = ["ToMe fuses in the first block too, so it costs less at the same r."]
    return study_section(experiment, result, findings=findings, parts=parts, notes=notes)


def _against_tome(groups: Groups) -> list[Finding]:
    pairs = zip(groups["mctf"], groups["tome"], strict=True)
    leads = {ours["label"]: kl_lead(ours, theirs) for ours, theirs in pairs}
    ours, theirs = (next(row["kl"] for row in groups[method] if row["r"] == R) for method in ("mctf", "tome"))
    at_r = f"at r = {R} it is {_lower(leads[str(R)])}, {number(ours, '.4f')} against {number(theirs, '.4f')}"
    findings = [Finding(f"MCTF's KL against ToMe's: {_sides(leads)}; {at_r}.", judge(leads[weakest(leads)]))]
    equal = leads_at_equal_cost(groups["mctf"], groups["tome"])
    return findings + ([_at_equal_cost("MCTF's KL against ToMe's", equal)] if equal else [])


def _at_equal_cost(words: str, leads: dict[str, Difference]) -> Finding:
    """words: for the two that are compared, what the paper has ahead first. leads: by r of that one."""
    r = weakest(leads)
    least = f"r = {r} speaks least for the paper, {_lower(leads[r])}"
    return Finding(f"{words} at equal cost: {_sides(leads)}; {least}.", judge(leads[r]))


def _sides(leads: dict[str, Difference]) -> str:
    """As in "too close to call at r = 1, lower at r = 8, 16"."""
    places: dict[str, list[str]] = {}
    for r, lead in leads.items():
        side = "lower" if lead.mean > 0 else "higher"
        places.setdefault(side if lead.clear else "too close to call", []).append(r)
    return ", ".join(f"{side} at r = {', '.join(labels)}" for side, labels in places.items())


def _lower(lead: Difference) -> str:
    return f"{lead.size()} {'lower' if lead.mean > 0 else 'higher'}"


def _published_off_the_shelf() -> Table:
    cases = [(backbone, method) for backbone in ("deit_tiny", "deit_small") for method in ("mctf", "tome")]
    titles = (Column(METHODS[method], Origin.PAPER, over=BACKBONES[backbone]) for backbone, method in cases)
    tops = [paper.off_the_shelf(backbone, method) for backbone, method in cases]
    rows = tuple((str(r), *(number(top[r], ".1f") for top in tops)) for r in tops[0])
    caption = "Table 3: top-1 % without training, on all of ImageNet's validation images"
    return Table(caption, (Column("r"), *titles), rows)


def criteria_section(experiment: Experiment, result: Result) -> Section:
    groups = grouped(result)
    at_r = {group: next(row for row in rows if row["r"] == R) for group, rows in groups.items()}
    rows = [
        (criteria_words(name), *measured_cells(row), published_top1("criteria", name)) for name, row in at_r.items()
    ]
    columns = (Column("criteria", text=True), *MEASURED, PUBLISHED_TOP1)
    strong = frozenset(index for index, name in enumerate(at_r) if name == ALL)
    table = Table(f"Subsets of the criteria at r = {R}", columns, tuple(rows), strong)
    parts = [table, *curves(groups, criteria_words, what="set of criteria")]
    findings = _best_criteria(at_r) if knows_kl(result) else []
    return study_section(experiment, result, findings=findings, parts=parts, notes=[FINE_TUNED])


def _best_criteria(at_r: dict[str, Row]) -> list[Finding]:
    words = {name: criteria_words(name) for name in at_r}
    others = {name: row for name, row in at_r.items() if name != ALL}
    alone = _against(words["sim"], at_r["sim"], {words["info"]: at_r["info"]})
    return [
        _against(f"At r = {R} {words[ALL]}", at_r[ALL], {words[name]: row for name, row in others.items()}),
        Finding(f"Alone, {alone.text}", alone.verdict),
    ]


def _against(words: str, own: Row, rivals: dict[str, Row]) -> Finding:
    """What the paper has ahead beside the rival that speaks most against it. words: for it; rivals: by theirs."""
    leads = {name: kl_lead(own, row) for name, row in rivals.items()}
    name = weakest(leads)
    rival = name if len(rivals) == 1 else f"its strongest rival, {name},"
    text = f"{words} has a KL of {number(own['kl'], '.4f')}; {rival} {rival_words(own, rivals[name])}."
    return Finding(text, judge(leads[name]))


def ahead_section(experiment: Experiment, result: Result) -> Section:
    groups = grouped(result)
    table = side_by_side("One-step-ahead attention and that of the block before", groups, ATTENTION.__getitem__)
    leads = leads_at_equal_cost(groups["one_step_ahead"], groups["previous"]) if knows_kl(result) else {}
    words = "KL with the coming attention against that with the attention of the block before"
    return study_section(
        experiment,
        result,
        findings=[_at_equal_cost(words, leads)] if leads else [],
        parts=[table, *curves(groups, ATTENTION.__getitem__, what="kind of attention")],
        notes=[
            "With the attention of the block before, tokens are fused after its MLP, which costs more at the same r.",
            "The paper shows this as a plot of a fine-tuned DeiT-S, without figures.",
        ],
    )


def design_section(experiment: Experiment, result: Result) -> Section:
    groups = grouped(result)
    rows: list[tuple[str, ...]] = []
    strong, headings = set(), dict[int, str]()
    for group, members in groups.items():
        for row in members:
            if row is members[0]:
                headings[len(rows)] = GROUPS[group].capitalize()
            strong |= {len(rows)} if row["label"] in _OWN else set()
            printed = paper.ablation(group, row["label"])
            gflops = number(None if printed is None else printed.gflops, ".1f")
            top1 = published_top1(group, row["label"])
            rows.append((LABELS[row["label"]], *measured_cells(row), gflops, top1))
    columns = (Column("variant", text=True), *MEASURED, Column("GFLOPs", Origin.PAPER), PUBLISHED_TOP1)
    caption = f"Design choices at r = {R}; the paper's own are in bold"
    table = Table(caption, columns, tuple(rows), frozenset(strong), headings)
    known = knows_kl(result)
    findings = [each for group, members in groups.items() for each in _choices(group, members)] if known else []
    return study_section(experiment, result, findings=findings, parts=[table], notes=[FINE_TUNED])


def _choices(group: str, members: list[Row]) -> Iterator[Finding]:
    """The paper's choice against the variants that the paper has, none better there; then against each other one."""
    own = next(row for row in members if row["label"] in _OWN)
    words = f"{GROUPS[group].capitalize()}: {LABELS[own['label']]}"
    others = [row for row in members if row is not own]
    printed = {LABELS[row["label"]]: row for row in others if paper.ablation(group, row["label"]) is not None}
    if printed:
        yield _against(words, own, printed)
    for row in others:
        if LABELS[row["label"]] not in printed:
            yield Finding(_against(words, own, {LABELS[row["label"]]: row}).text)


def temperatures_section(experiment: Experiment, result: Result) -> Section:
    findings, rows = [], list[tuple[str, ...]]()
    strong, headings = set(), dict[int, str]()
    for group, members in grouped(result).items():
        own = next(row for row in members if row["label"] == DEFAULTS[group])
        headings[len(rows)] = GROUPS[group].capitalize()
        strong.add(len(rows) + members.index(own))
        rows += [(row["label"], *measured_cells(row)[:3], published_top1(group, row["label"])) for row in members]
        if knows_kl(result):
            rivals = {row["label"]: row for row in members if row is not own}
            findings.append(_against(f"{GROUPS[group].capitalize()}: {own['label']}", own, rivals))
    columns = (Column("value", text=True), *MEASURED[:3], PUBLISHED_TOP1)
    caption = f"Temperatures at r = {R}; the defaults are in bold"
    table = Table(caption, columns, tuple(rows), frozenset(strong), headings)
    return study_section(experiment, result, findings=findings, parts=[table], notes=[FINE_TUNED])
