"""The process that measures a trial."""
