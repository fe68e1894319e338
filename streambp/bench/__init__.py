"""The experiment harness: a validated config in, one record per run out."""
