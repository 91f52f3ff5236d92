"""What an experiment is: it measures one thing the paper reports and gives numbers that JSON can hold.

Axes: B images, 3 H W.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ...data import Batch, Batches, Preprocessing

Advance = Callable[[int], None]  # so many more steps are done
Result = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is measured: an unfused model in evaluation mode, and images for it. name: the model's."""

    name: str
    model: nn.Module
    batches: Batches
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.batches.images)

    def some(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Names and inputs (3 H W) of at most `count` images, evenly spaced over all of them."""
        images = self.batches.images.spaced(count)
        for index, name in enumerate(images.names):
            yield name, self.batches.transform(images.read(index))

    def to_model(self, pixels: Tensor) -> Tensor:
        """Pixels where the model is and in its dtype."""
        weight = next(self.model.parameters())
        return pixels.to(weight.device, weight.dtype)


@dataclass(frozen=True)
class Task:
    """What an experiment is given when it runs.

    subject: None for an experiment that needs no images. quick: measure fewer settings. pictures: a folder for
    pictures. advance: to be told of every step. results: of other experiments on the same subject, by name; what they
    have measured need not be measured again.
    """

    subject: Subject | None
    quick: bool
    pictures: Path
    advance: Advance = lambda _: None
    results: Mapping[str, Result] = field(default_factory=dict)

    @property
    def seen(self) -> Subject:
        """The subject of an experiment that needs one."""
        assert self.subject is not None
        return self.subject

    def batches(self, weight: int) -> Iterator[Batch]:
        """All batches; each counts as `weight` steps."""
        for batch in self.seen.batches:
            yield batch
            self.advance(weight)


class Experiment(ABC):
    """Implementations are frozen dataclasses.

    name: of its file and for the command line. measures: one sentence. sources: the tables and figures of the paper,
    as in "Table 1". needs_images: whether it needs a subject. form: of its result, counted up when that changes, so
    that a file with less in it is never taken for a whole one.
    """

    name: str
    title: str
    measures: str
    sources: tuple[str, ...]
    needs_images: bool = True
    form: ClassVar[int] = 1

    @abstractmethod
    def steps(self, task: Task) -> int:
        """How many steps it will report, a step being about one batch through one model."""

    @abstractmethod
    def run(self, task: Task) -> Result:
        """Measure. Everything in the result is a number, a text, a list, a dictionary by text, or None."""

    def unsuited(self, subject: Subject) -> str | None:
        """Why it cannot be run on this subject; None where it can."""
        return None
