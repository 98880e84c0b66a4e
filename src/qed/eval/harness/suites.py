"""The table of suites. A suite is a row: its name, and lm-eval's tasks with what a table shows of each.

Another suite is another row. Tasks that no suite has run as well, by their names in lm-eval, with `--harness lm-eval`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..options import Options

PREFIX = "lm-eval"  # what names of its result files begin with

Kinds = type | tuple[type, ...]
CHOICES: dict[str, Kinds] = {"choices": dict, "answerKey": str}


@dataclass(frozen=True, kw_only=True)
class Member:
    """A task of a suite.

    Attributes:
        title: what tables call it.
        shown: the measures that stand in tables, as lm-eval names them; for RULER none, since lengths are its measures.
        fields: what every line of its file must have, as in the data set that lm-eval reads.
        dataset: for a task whose file is not of lines, what that file is.
        essays: whether it reads --essays.
        lengths: whether it is asked at the lengths of --lengths.
    """

    title: str
    shown: tuple[str, ...] = ()
    fields: Mapping[str, Kinds] = field(default_factory=dict)
    dataset: str = ""
    essays: bool = False
    lengths: bool = False

    @property
    def reads_file(self) -> bool:
        """Whether --data may name a file of it."""
        return bool(self.fields or self.dataset)


def _ruler(title: str, *, essays: bool = False, dataset: str = "") -> Member:
    return Member(title=title, essays=essays, dataset=dataset, lengths=True)


SUITES: dict[str, dict[str, Member]] = {
    "commonsense": {
        "wikitext": Member(
            title="WikiText", shown=("word_perplexity", "byte_perplexity", "bits_per_byte"), fields={"page": str}
        ),
        "lambada_openai": Member(title="LAMBADA", shown=("perplexity", "acc"), fields={"text": str}),
        "piqa": Member(title="PIQA", shown=("acc",), fields={"goal": str, "sol1": str, "sol2": str, "label": int}),
        "hellaswag": Member(
            title="HellaSwag",
            shown=("acc_norm",),
            fields={"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": (str, int)},
        ),
        "winogrande": Member(
            title="WinoGrande",
            shown=("acc",),
            fields={"sentence": str, "option1": str, "option2": str, "answer": str},
        ),
        "arc_easy": Member(title="ARC-easy", shown=("acc",), fields={"question": str, **CHOICES}),
        "arc_challenge": Member(title="ARC-challenge", shown=("acc_norm",), fields={"question": str, **CHOICES}),
        "boolq": Member(title="BoolQ", shown=("acc",), fields={"passage": str, "question": str, "label": int}),
        "sciq": Member(
            title="SciQ",
            shown=("acc",),
            fields=dict.fromkeys(
                ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer"), str
            ),
        ),
        "copa": Member(
            title="COPA",
            shown=("acc",),
            fields={**dict.fromkeys(("premise", "question", "choice1", "choice2"), str), "label": int},
        ),
        "openbookqa": Member(title="OpenBookQA", shown=("acc_norm",), fields={"question_stem": str, **CHOICES}),
    },
    "ruler": {
        "niah_single_1": _ruler("S-NIAH-1"),
        "niah_single_2": _ruler("S-NIAH-2", essays=True),
        "niah_single_3": _ruler("S-NIAH-3", essays=True),
        "niah_multikey_1": _ruler("MK-NIAH-1", essays=True),
        "niah_multikey_2": _ruler("MK-NIAH-2"),
        "niah_multikey_3": _ruler("MK-NIAH-3"),
        "niah_multivalue": _ruler("MV-NIAH", essays=True),
        "niah_multiquery": _ruler("MQ-NIAH", essays=True),
        "ruler_vt": _ruler("VT"),
        "ruler_cwe": _ruler("CWE"),
        "ruler_fwe": _ruler("FWE"),
        "ruler_qa_squad": _ruler("QA-SQuAD", dataset="SQuAD's dev-v2.0.json"),
        "ruler_qa_hotpot": _ruler("QA-HotpotQA", dataset="HotpotQA's hotpot_dev_distractor_v1.json"),
    },
}
MEMBERS: dict[str, Member] = {name: member for suite in SUITES.values() for name, member in suite.items()}


def has_files(name: str, options: Options) -> bool:
    """Whether all that a task of lm-eval reads is given, so that nothing is downloaded for it.

    Args:
        name: of the task.
        options: of which `data` and `essays` are read.
    """
    member = MEMBERS.get(name)
    if member is not None and member.essays:
        return options.essays is not None
    return name in options.data or (member is not None and not member.reads_file)
