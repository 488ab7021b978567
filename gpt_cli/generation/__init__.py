"""Continue texts: sampling, constraints, batches, drafts, prefixes."""
