"""python -m tests.attack: the standing attack, large. See docs/attack.md."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "attack.md"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make attack", description="Fuzz the package; exit status 1 if a case failed."
    )
    parser.add_argument("--only", default="", help="fuzzers whose names begin so: op, or op.chunk_form")
    parser.add_argument("--seed", type=int, help="just this case of them, here, with its traceback")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases; the page is written for all of them")
    given = parser.parse_args()
    # Both are read when torch, qed and Triton are first imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    from . import running
    from .table import FUZZERS

    chosen = [x for x in FUZZERS if x.name.startswith(given.only)]
    if not chosen:
        parser.error(f"--only: expected the beginning of one of {', '.join(x.name for x in FUZZERS)}, got {given.only}")
    if given.seed is not None:
        fine = [running.once(x.name, given.seed) for x in chosen]
        return 0 if all(fine) else 1
    cases = [(x.name, seed) for x in chosen for seed in range(max(1, round(x.large * given.share)))]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qed-attack-") as folder:
        os.environ["TMPDIR"] = folder  # so that nothing is left of processes that a case has ended
        failures = running.run(cases)
    found = running.table(cases, failures, time.monotonic() - start)
    print(found)
    if failures:
        print("\n" + running.failed_list(failures))
    if not given.only and given.share == 1:
        PAGE.write_text(running.written(PAGE.read_text(), found))
        print(f"\nwritten to {PAGE}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
