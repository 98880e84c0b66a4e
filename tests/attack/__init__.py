"""The standing attack: fuzzers that hold the package to its contracts. `docs/attack.md` says how to run them."""
