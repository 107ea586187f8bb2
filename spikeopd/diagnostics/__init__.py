"""Why an adapted student is better or worse: the paper's paired-prefix diagnostics (Figs. 1-2)."""
