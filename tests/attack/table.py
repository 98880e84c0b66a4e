"""All fuzzers: what each tries, and how many cases of it the tests and the large run have.

A fuzzer is a function of a seed that returns if all is well and raises if it is not. Its name is that of its module and
its own, `op.chunk_form`; name and seed are all it takes to see a failure again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from . import commands, files, kills, model, op, results, rules


@dataclass(frozen=True)
class Fuzzer:
    case: Callable[[int], None]
    small: int  # cases in `make test`
    large: int  # cases in `make attack`
    each: int = 1  # how many things a case tries
    unit: str = "cases"

    @property
    def name(self) -> str:
        return f"{self.case.__module__.rpartition('.')[2]}.{self.case.__name__}"

    @property
    def what(self) -> str:
        """The first sentence of the function's own description."""
        return " ".join((self.case.__doc__ or "").split()).partition(". ")[0].rstrip(".")


FUZZERS = (
    Fuzzer(op.chunk_form, 12, 4000),
    *((Fuzzer(op.kernels, 6, 600),) if op.INTERPRETED else ()),
    Fuzzer(op.laws, 30, 4000),
    Fuzzer(op.refusals, 20, 2000),
    Fuzzer(rules.written_out, 10, 1000),
    Fuzzer(rules.identities, 12, 1000),
    Fuzzer(rules.wrong_projections, 10, 500),
    Fuzzer(model.readings, 30, 2500),
    Fuzzer(model.hostile_calls, 12, 600),
    Fuzzer(model.hostile_configs, 12, 500),
    Fuzzer(files.damaged_checkpoints, 10, 600),
    Fuzzer(files.damaged_exports, 10, 600),
    Fuzzer(results.damaged_metrics, 5, 300),
    Fuzzer(results.damaged_results, 4, 300),
    Fuzzer(results.damaged_answers, 6, 400),
    Fuzzer(commands.wrong_words, 30, 1500),
    Fuzzer(kills.kill, 1, 40, each=kills.KILLS, unit="kills"),
)
BY_NAME = {fuzzer.name: fuzzer for fuzzer in FUZZERS}
