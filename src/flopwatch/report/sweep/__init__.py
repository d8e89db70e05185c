"""The report of a sweep as a document."""
