"""What the paper measures, measured again: one file an experiment, and the paper's own figures beside them."""
