"""What is reproduced at each scale: which trainings, on which data, and what is measured of each.

| scale | machine | model | data | needles |
|---|---|---|---|---|
| mini | two cores, minutes | 0.1M, rows of 128 | the built-in corpus, one token a word | pairs, to 16 times |
| small | one large GPU, minutes | 14M, rows of 512 | a corpus, 60 % of it practice documents | S-NIAH, to 64 times |
| medium | one large GPU, hours | 64M, rows of 2048 | a corpus, 10 % of it practice | S-NIAH, multi-key, to 16 times |
| paper-short | one large GPU, hours | 340M, rows of 2048 | the same as medium's | S-NIAH, multi-key, to 16 times |
| paper | GPUs, days | 340M, rows of 2048 | FineWeb-Edu, 15B tokens | S-NIAH, to 16 times |

Two scales ask what a state can do, on rows that are made, with one training for each of several settings:

| scale | machine | model | settings | measured |
|---|---|---|---|---|
| tracking | two cores, minutes an arm and seed | one layer, rows of 32 | groups | running products, to 16 times |
| recall | one large GPU, minutes | two layers, one head | widths of the head | pairs held, from 4 to 512 |
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..choices import check_choice
from ..data.groups import GROUPS
from ..data.practice import Practice
from ..eval.task import NeedleTask
from ..eval.tasks import named
from ..recipes import build, usual_theta
from ..recipes.arms import Arm
from ..recipes.generated import LOADS
from ..recipes.paper import ARMS
from ..rules import RULES
from ..train.config import TrainConfig

# Fields of a plan that change nothing about a training; to the files that are imported others may be added.
MAY_CHANGE = {"arms", "seeds", "settings", "jobs", "imported"}
ALL_STAGES = ("train", "eval", "off", "strength", "eigenvalues")


class Unit(NamedTuple):
    """One training and its measurements. It has its own process and resumes by itself."""

    arm: str  # a rule and what differs from the recipe (`recipes/arms.py`)
    seed: int
    setting: str = ""  # one of the plan's, where it has several

    @property
    def name(self) -> str:
        """The name of its folder, such as "qed-0" or "s5/qed-0"."""
        return f"{self.setting}/{self.arm}-{self.seed}".lstrip("/")

    @staticmethod
    def parse(name: str) -> Unit:
        """The unit of this name."""
        setting, _, rest = name.rpartition("/")
        arm, _, seed = rest.rpartition("-")
        return Unit(arm, int(seed), setting)


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files that a user may give. Without a corpus, the built-in one stands in for it."""

    corpus: str | None = None
    validation: str | None = None
    tokenizer: str | None = None
    words: str | None = None
    essays: str | None = None
    recall: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides a reproduction: trainings, data, tasks and measurements."""

    scale: str
    recipe: str
    changes: dict[str, str] = field(default_factory=dict)  # fields of the recipe that are other than it says
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1)
    varied: str = ""  # the recipe's parameter that settings are values of; with settings, rows are made
    settings: tuple[str, ...] = ()  # each is trained by itself, and its runs have a folder of their own
    source: str = ""
    validation: str = ""  # a source of its own for validation, or nothing
    tokenizer: str = ""
    limit: int | None = None  # documents that are read at most
    held_out: int = 0  # without a source for validation, one document in so many is held out for it
    practice: float = 0.0  # share of the corpus that is practice documents
    needles: tuple[str, ...] = ()  # needle tasks; the first one is also tried during training
    lengths: tuple[int, ...] = ()  # of what is evaluated; where there is none, that of training
    samples: int | None = 500
    recall: dict[str, str] = field(default_factory=dict)  # files of recall tasks, by task
    recall_samples: int | None = None
    words: str | None = None
    essays: str | None = None
    off: tuple[str, ...] = ()  # arms that are evaluated on all needle tasks with λ = 0 too
    swept: tuple[str, ...] = ("qed",)  # arms whose λ is scaled by all of the paper's s, on the first needle task
    strength_lengths: tuple[int, ...] = ()  # some of the lengths, for that sweep
    eigenvalue_samples: int = 1_180_000
    positions: int = 0  # tokens of a row in which the loss is measured by position
    position_rows: int = 16
    batch: int = 64  # prompts that are answered together
    jobs: int = 1  # trainings that run at the same time
    registered: str = ""  # sha256 of the plan under which all of this is registered (`provenance.py`)
    imported: dict[str, str] = field(default_factory=dict)  # sha256 of the files that --import named, by their names

    def __post_init__(self) -> None:
        for option, given in (("--seeds", self.seeds), ("--arms", self.arms)):
            if not given or len(set(given)) != len(given):
                raise ValueError(f"{option}: expected one or more, each once, got {list(given)}")
        if min(self.seeds) < 0:
            raise ValueError(f"--seeds: expected whole numbers of 0 or more, got {min(self.seeds)}")
        for arm in self.arms:
            config = dataclasses.asdict(self.config(Unit(arm, 0, next(iter(self.settings), "")), Path()))
            same = Arm.of(config, usual_theta(config)).name  # an arm has one name, and reports use it too
            if same != arm:
                raise ValueError(f"--arms: expected {same!r}, which is the same, got {arm!r}")
        if bool(self.settings) != bool(self.varied) or len(set(self.settings)) != len(self.settings):
            raise ValueError(f"--settings: expected one or more, each once, got {list(self.settings)}")
        for task in self.needles:
            named(task, NeedleTask, "--needles")
        if bool(self.needles) == bool(self.settings) or len(set(self.needles)) != len(self.needles):
            raise ValueError(f"--needles: expected one or more, each once, got {list(self.needles)}")
        if not set(self.strength_lengths) <= set(self.lengths):
            raise ValueError(f"strength_lengths: expected some of {self.lengths}, got {self.strength_lengths}")
        if self.practice:
            Practice(share=self.practice)

    @property
    def units(self) -> list[Unit]:
        """All trainings, seed by seed."""
        settings = self.settings or ("",)
        return [Unit(arm, seed, setting) for seed in self.seeds for arm in self.arms for setting in settings]

    def config(self, unit: Unit, out: Path) -> TrainConfig:
        """The training configuration of a unit whose data are in the folder `out`."""
        arm = Arm.parse(unit.arm)
        given = {"data": str(out / "data"), "validation": str(out / "validation")}
        given = {self.varied: unit.setting} if self.settings else given
        return build(self.recipe, {"arm": arm.rule, "seed": str(unit.seed)} | given | arm.changes | self.changes)

    def stages(self, unit: Unit) -> list[str]:
        """The stages of a unit, in order."""
        if self.settings:
            return ["train", "eval"]
        optional = {"off": self.off, "strength": self.swept}
        return [stage for stage in ALL_STAGES if stage not in optional or unit.arm in optional[stage]]

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote."""
        values = json.loads(text)
        lists = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}
        return Plan(**(values | lists))


def other_fields(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The fields in which two plans are of different reproductions, whose trainings do not belong into one folder.

    Args:
        before: an earlier plan, as JSON. It may be of a version that did not have all fields.
        now: a plan, as JSON.
    """
    usual = json.loads(json.dumps({x.name: x.default for x in dataclasses.fields(Plan)}, default=str))
    return sorted(x for x in now if (usual | before).get(x) != now[x] and x not in MAY_CHANGE)


def _without_files(scale: str, files: Files) -> None:
    given = [name for name, x in dataclasses.asdict(files).items() if x]
    if given:
        raise ValueError(f"--scale {scale}: expected no files, since it has its own corpus, got a {given[0]}")


def mini(files: Files) -> Plan:
    """Models of 0.1M parameters on the built-in corpus, for two cores and minutes. It takes no files."""
    _without_files("mini", files)
    return Plan(
        scale="mini",
        recipe="mini",
        arms=("gdn2", "qed", "qed-rand"),
        seeds=(0,),
        source="synthetic:60000",
        validation="",
        held_out=30,
        tokenizer="words:512",
        needles=("pairs",),
        lengths=(128, 192, 256, 384, 512, 768, 1024, 2048),
        samples=200,
        strength_lengths=(128, 256, 512),
        eigenvalue_samples=100_000,
        positions=2048,
        jobs=3,  # all arms at once: of two cores none is idle while a last arm is trained alone
    )


def _tasks(files: Files) -> dict[str, Any]:
    """The tasks that these files allow: S-NIAH-2 and -3 need essays, and recall tasks their own files."""
    given: dict[str, Any] = {"validation": files.validation or "", "recall": files.recall}
    essays = ("niah_single_2", "niah_single_3") if files.essays else ()
    return given | {"words": files.words, "essays": files.essays, "needles": ("niah_single_1", *essays)}


def small(files: Files) -> Plan:
    """Models of 14M parameters, for one large GPU and minutes."""
    return Plan(
        **_tasks(files),
        scale="small",
        recipe="small",
        changes={"validate_every": "200", "save_every": "1000", "log_every": "50"},
        source=files.corpus or "synthetic:600000",
        held_out=0 if files.validation else 100,
        tokenizer=files.tokenizer or "bpe:8192",
        practice=0.6,
        lengths=(512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 32768),
        strength_lengths=(4096, 8192, 16384, 32768),
        positions=16384,
        jobs=5,
    )


def _with_practice(files: Files) -> dict[str, Any]:
    """Data and tasks of the two scales that train on 48M tokens of text and practice documents.

    From a given corpus the first 10,000 documents are read. If they are like an encyclopaedia's, 178 MB, they have as
    many tokens.
    """
    settings = _tasks(files)
    if files.essays:
        settings["needles"] += ("niah_multikey_1",)
    return settings | {
        "source": files.corpus or "synthetic:1000000",
        "limit": 10_000 if files.corpus else None,
        "held_out": 0 if files.validation else 100,
        "tokenizer": files.tokenizer or "bpe:8192",
        "practice": 0.1,
        "arms": ("gdn2", "qed", "qed-rand"),
        "lengths": (1024, 2048, 4096, 8192, 16384, 32768),
        "samples": 250,
        "strength_lengths": (4096, 8192, 16384, 32768),
        "positions": 32768,
    }


def medium(files: Files) -> Plan:
    """Models of 64M parameters and twelve seeds, for one large GPU and hours."""
    return Plan(
        **_with_practice(files), scale="medium", recipe="medium", seeds=tuple(range(12)), off=("qed",), swept=(), jobs=3
    )


def paper_short(files: Files) -> Plan:
    """Models of the paper's size, 340M parameters, on medium's data, for one large GPU and hours."""
    return Plan(
        **_with_practice(files),
        scale="paper-short",
        recipe="paper_short",
        seeds=tuple(range(4)),
        off=("qed", "qed+theta10"),
    )


def paper(files: Files) -> Plan:
    """The paper's own experiment, for GPUs and days. 16M documents of FineWeb-Edu have just over 15B tokens."""
    return Plan(
        **_tasks(files),
        scale="paper",
        recipe="paper_340m",
        source=files.corpus or "hf:HuggingFaceFW/fineweb-edu:sample-100BT",
        limit=None if files.corpus else 16_000_000,
        held_out=0 if files.validation else 1000,
        tokenizer=files.tokenizer or "llama2.model",
        lengths=(1024, 2048, 4096, 8192, 16384, 32768),
        strength_lengths=(4096, 8192, 16384, 32768),
        positions=32768,
    )


def every_rule() -> tuple[str, ...]:
    """Every rule of the table, and again with an erase gate in (0, 2) where it has one."""
    return (*RULES, *(f"{name}+erase2" for name, rule in RULES.items() if rule.erase != "none"))


def tracking(files: Files) -> Plan:
    """One layer on the words of each of several groups, for two cores and minutes an arm and seed."""
    _without_files("tracking", files)
    return Plan(
        scale="tracking",
        recipe="tracking",
        varied="group",
        settings=tuple(GROUPS),
        arms=every_rule(),
        seeds=(0, 1, 2),
        lengths=(512,),
        samples=None,
        jobs=2,
    )


def recall(files: Files) -> Plan:
    """Two layers with one head of several widths recall up to 512 pairs: minutes on a GPU, and on two cores for the
    two smallest widths."""
    _without_files("recall", files)
    return Plan(
        scale="recall",
        recipe="recall",
        varied="width",
        settings=tuple(map(str, LOADS)),
        arms=(*RULES, "qed@0.5", "qed@1"),
        seeds=(0, 1, 2),
        samples=None,
        jobs=2,
    )


PLANS: dict[str, Callable[[Files], Plan]] = {
    "mini": mini,
    "small": small,
    "medium": medium,
    "paper-short": paper_short,
    "paper": paper,
    "tracking": tracking,
    "recall": recall,
}


def with_settings(plan: Plan, settings: tuple[str, ...]) -> Plan:
    """The plan with some of its settings alone; ValueError for a setting that it does not have."""
    if not plan.settings:
        raise ValueError(f"--settings: expected a scale that has several, tracking or recall, got {plan.scale}")
    for setting in settings:
        check_choice("--settings", setting, plan.settings)
    return dataclasses.replace(plan, settings=settings)


def rehearsed(plan: Plan) -> Plan:
    """The plan with a few steps and examples for every stage of every arm: it only shows that all of it works."""
    if plan.settings:  # of made rows a single step is enough
        return dataclasses.replace(
            plan, changes=plan.changes | {"total_tokens": "1"}, seeds=plan.seeds[:1], samples=2, batch=2
        )
    rows = {"sequence": "256", "batch_tokens": "512", "micro_tokens": "512", "save_every": "1000"}
    tokens = {"total_tokens": "1536", "decay_start_tokens": "1024", "validation_tokens": "512"}
    lengths = plan.lengths[:2]
    hub = plan.source.startswith("hf:")
    return dataclasses.replace(
        plan,
        changes=plan.changes | rows | tokens,
        seeds=plan.seeds[:1],
        source="synthetic:2000" if hub else plan.source,
        limit=2000,
        held_out=plan.held_out and 10,
        tokenizer="bpe:512" if hub and not Path(plan.tokenizer).is_file() else plan.tokenizer,
        lengths=lengths,
        samples=2,
        recall_samples=2,
        strength_lengths=lengths[:1],
        eigenvalue_samples=1000,
        positions=512,
        position_rows=1,
        batch=2,
    )
