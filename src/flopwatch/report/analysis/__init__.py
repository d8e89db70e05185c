"""From a captured sweep to its summary. Pure functions on frozen records."""
