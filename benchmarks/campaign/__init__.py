"""Everything that takes too long for CI, and when it was last run."""
