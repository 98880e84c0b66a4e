"""`qed reproduce`: the paper's experiment, at three scales. `plan.py` says what, `unit.py` one training and all that is
measured of it, `run.py` everything in order."""
