"""From result files to statements: statistics, the strength sweep, eigenvalues, tables, figures and the report."""
