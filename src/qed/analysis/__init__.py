"""From result files to numbers: results, statistics, the strength sweep, eigenvalues, registered tests, claims."""
