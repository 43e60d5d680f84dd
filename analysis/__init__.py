"""Tables and figures from the rows in `results/`, with the paper's numbers beside them. Never imports torch."""
