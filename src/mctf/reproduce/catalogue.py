"""All experiments, in the order of the report, and the section that each becomes."""

from collections.abc import Callable, Mapping

from . import analysis_sections, cost_sections, studies, study_sections
from .analyses import ClassToken, LargestToken
from .costs import TABLE_1, TABLE_2, CostsByR
from .document import Section
from .pictures import AttentionPictures, FusedPatches
from .records import Record
from .runner import Experiment, Result

_SECTIONS: tuple[tuple[Experiment, Callable[[Experiment, Result], Section]], ...] = (
    (TABLE_1, cost_sections.table_section),
    (TABLE_2, cost_sections.table_section),
    (CostsByR(), cost_sections.by_r_section),
    (studies.OFF_THE_SHELF, study_sections.off_the_shelf_section),
    (studies.CRITERIA, study_sections.criteria_section),
    (studies.AHEAD, study_sections.ahead_section),
    (studies.DESIGN, study_sections.design_section),
    (studies.TEMPERATURE, study_sections.temperatures_section),
    (ClassToken(), analysis_sections.class_token_section),
    (LargestToken(), analysis_sections.largest_token_section),
    (AttentionPictures(), analysis_sections.attention_section),
    (FusedPatches(), analysis_sections.fused_section),
)
EXPERIMENTS = tuple(experiment for experiment, _ in _SECTIONS)


def sections(records: Mapping[str, Record]) -> tuple[Section, ...]:
    """A section for every record."""
    return tuple(make(each, records[each.name].result) for each, make in _SECTIONS if each.name in records)
