"""`qed reproduce`: the paper's experiment at several scales.

`plan.py` says what is trained and measured, `unit.py` does one training and its measurements, `run.py` does everything
in order, `progress.py` shows how far it is, and `collecting.py` makes results small enough to keep.
"""
