"""The paper's own numbers, of models with 340M parameters trained on 15B tokens. Tables show them beside ours."""

from typing import Any

TRAIN_LENGTH = 2048

# Table 2: final validation loss, by seed.
VALIDATION_LOSS = {
    0: {"gdn2": 2.3714, "qed": 2.3719, "qed-rand": 2.3712, "qed-nogate": 2.3718, "qed-nogate-noproj": 2.3724},
    1: {"gdn2": 2.3746, "qed": 2.3735, "qed-rand": 2.3735, "qed-nogate": 2.3733, "qed-nogate-noproj": 2.3741},
}

# Table 3: S-NIAH-1 at 1K … 32K, then FDA, SQuAD-completion and SWDE, per cent.
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
RECALL = ("fda", "squad_completion", "swde")
NIAH_1 = {
    0: {
        "gdn2": (100.0, 99.0, 93.4, 64.4, 21.8, 9.4, 4.45, 29.39, 19.08),
        "qed": (100.0, 100.0, 99.6, 91.6, 39.8, 15.8, 7.80, 29.29, 21.51),
        "qed-rand": (99.6, 99.6, 97.6, 66.0, 22.0, 7.0, 6.44, 29.22, 19.89),
        "qed-nogate": (100.0, 99.2, 89.4, 51.2, 17.0, 6.8, 7.35, 28.82, 19.80),
        "qed-nogate-noproj": (100.0, 100.0, 99.0, 91.0, 33.4, 14.0, 4.54, 29.93, 19.98),
    },
    1: {
        "gdn2": (100.0, 95.6, 79.2, 50.6, 21.2, 6.0, 4.26, 32.37, 19.62),
        "qed": (100.0, 99.6, 96.0, 84.2, 59.8, 30.2, 7.99, 32.21, 19.62),
        "qed-rand": (100.0, 98.8, 94.4, 82.0, 47.0, 15.6, 5.17, 30.80, 18.36),
        "qed-nogate": (100.0, 99.6, 96.8, 87.6, 59.0, 25.8, 6.35, 29.69, 17.73),
        "qed-nogate-noproj": (100.0, 100.0, 42.2, 17.2, 44.2, 29.8, 5.81, 29.36, 18.00),
    },
}

# Table 4: the strength sweep: mean λ, S-NIAH-1 at 4K … 32K, FDA.
STRENGTH_LENGTHS = (4096, 8192, 16384, 32768)
STRENGTH = {
    0: {
        -1.0: (-0.101, 100.0, 91.2, 39.8, 17.8, 6.99),
        0.0: (0.0, 100.0, 90.0, 41.4, 17.6, 7.53),
        0.5: (0.051, 100.0, 89.6, 42.0, 18.4, 7.53),
        1.0: (0.101, 100.0, 89.2, 41.8, 18.0, 7.80),
        1.5: (0.152, 100.0, 90.4, 41.6, 17.0, 7.80),
        2.0: (0.203, 99.8, 91.4, 43.6, 15.6, 7.62),
    },
    1: {
        -1.0: (-0.120, 91.6, 78.0, 44.8, 17.0, 7.99),
        0.0: (0.0, 93.2, 79.8, 55.0, 23.2, 7.53),
        0.5: (0.060, 94.8, 82.0, 61.0, 26.4, 7.80),
        1.0: (0.120, 97.2, 83.6, 65.6, 32.6, 7.71),
        1.5: (0.180, 98.0, 86.4, 69.8, 35.0, 7.89),
        2.0: (0.241, 99.0, 89.0, 73.0, 35.4, 7.44),
    },
}

# §6: the eigenvalue of the unprojected models, over 1.18M token-head samples, and what projecting would change.
EIGENVALUES: dict[str, Any] = {
    "rule": "qed-nogate-noproj",
    "samples": 1_180_000,
    "least": -0.011,
    "most": 0.985,
    "change": 1e-3,
}

# The contrasts of Figure 2: each is the first arm minus the second, which differ in one thing.
CONTRASTS = {
    "mechanism": ("qed", "gdn2"),
    "direction": ("qed", "qed-rand"),
    "gate": ("qed", "qed-nogate"),
    "projection": ("qed-nogate", "qed-nogate-noproj"),
}
